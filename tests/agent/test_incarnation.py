"""An agent's number grows with every start, whatever its node's clock does and whatever lies in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8watch_agent import incarnation

HOUR_NS = 3600 * 10**9


# case: DST-06
def test_a_clock_that_was_set_back_does_not_make_the_next_agent_an_older_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1_700_000_000 * 10**9
    numbers = [
        incarnation.begin(tmp_path / "spool", at) for at in (now, now + HOUR_NS, now, now + 1, now + 2 * HOUR_NS)
    ]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (now, now + 2 * HOUR_NS)
    assert "set back 3600 s" in caplog.text


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff", b"-5", str(2**63).encode()])
def test_a_file_that_is_none_of_ours_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / incarnation.NAME).write_bytes(content)
    assert incarnation.begin(tmp_path, 1000) == 1000


def test_without_a_disk_the_time_serves(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert incarnation.begin(tmp_path / "file" / "spool", 1000) == 1000
