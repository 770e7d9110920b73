"""Twenty of the random sequences of `bench/agreement_stress.py`; `make acceptance` plays two hundred."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_after_random_faults_and_actions_all_ranks_hold_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters step by step, the log of what was carried out and when, and the end; and the same decisions again."""
    monkeypatch.syspath_prepend(str(BENCH))
    import agreement_stress

    out = tmp_path / "stress.json"
    numbers = ["--sequences", "17", "--by-clock", "3", "--repeat-only", "3", "--launches", "1", "--seed", "1"]
    code = agreement_stress.main([*numbers, "--out", str(out)])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    found = json.loads(out.read_text())
    rows = found["rows"]
    assert len(rows) == 20
    assert all(row["pass"] for row in rows)
    assert (found["played_again"], found["differing_decisions"], found["differing_parameters"]) == (3, 0, 0)
    assert max(map(int, found["decided_steps"])) <= 5
    assert max(map(int, found["known_steps"])) <= 5
    # A run in which nothing happens would pass as well.
    carried_out = found["carried_out"]
    assert sum(carried_out.values()) >= 15
    assert carried_out["rollback"] >= 3
