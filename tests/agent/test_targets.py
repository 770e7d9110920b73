"""`targets.json`: right after every change, at a cost that does not grow with the runs that have ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hand_made as make
import pytest

from fp8watch.transport import endpoint as endpoints
from fp8watch.transport.endpoint import Endpoint
from fp8watch_agent import targets
from fp8watch_agent.exporter import Exporter
from fp8watch_agent.metrics_state import MetricsState


def _endpoint(run: str, port: int = 1, **changes: Any) -> Endpoint:
    fields: dict[str, Any] = {"pid": os.getpid(), "host": os.uname().nodename, "socket": "s", "store": "x"}
    return Endpoint(run=run, **{**fields, "metrics_url": f"http://127.0.0.1:{port}/metrics", **changes})


def _ended(run: str) -> Endpoint:
    return _endpoint(run, state="ended", metrics_url="", socket="")


def _shown(folder: Path) -> dict[str, list[str]]:
    groups = json.loads((folder / "targets.json").read_text())
    return {group["labels"]["__meta_fp8watch_run"]: group["targets"] for group in groups}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found: list[Path] = []
    inner = endpoints._read

    def read(path: Path) -> Endpoint | None:
        found.append(path)
        return inner(path)

    monkeypatch.setattr(endpoints, "_read", read)
    return found


def test_runs_that_ended_long_ago_are_not_read_again(tmp_path: Path, reads: list[Path]) -> None:
    for number in range(200):
        endpoints.write(tmp_path, _ended(f"old-{number}"))
    assert targets.announce(tmp_path, _endpoint("first", 1000))
    assert len(reads) == 201, "once, for nothing is known yet"
    reads.clear()
    assert targets.announce(tmp_path, _endpoint("second", 1001))
    assert _shown(tmp_path) == {"first": ["127.0.0.1:1000"], "second": ["127.0.0.1:1001"]}
    assert targets.announce(tmp_path, _ended("first"))
    assert _shown(tmp_path) == {"second": ["127.0.0.1:1001"]}
    assert targets.announce(tmp_path, _endpoint("first", 1002))
    assert _shown(tmp_path) == {"first": ["127.0.0.1:1002"], "second": ["127.0.0.1:1001"]}
    assert len(reads) <= 6


def test_what_another_process_listed_stays_until_that_process_is_gone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    targets.announce(tmp_path, _endpoint("theirs", 1000, pid=other.pid))
    targets.announce(tmp_path, _endpoint("ours", 1001))
    assert _shown(tmp_path).keys() == {"ours", "theirs"}
    other.communicate(b"\n")
    targets.announce(tmp_path, _ended("ours"))
    assert _shown(tmp_path) == {}


@pytest.mark.parametrize("damage", ["", "{", "{}", '[{"targets": []}]', "[1]"])
def test_a_damaged_list_is_made_anew(tmp_path: Path, damage: str) -> None:
    targets.announce(tmp_path, _endpoint("first", 1000))
    (tmp_path / "targets.json").write_text(damage)
    targets.announce(tmp_path, _endpoint("second", 1001))
    assert _shown(tmp_path).keys() == {"first", "second"}


def test_without_locks_a_list_that_lost_a_race_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    targets.announce(tmp_path, _endpoint("first", 1000))
    (tmp_path / "targets.json").write_text("[]")  # as another wrote it who had not seen the first
    targets.announce(tmp_path, _endpoint("second", 1001))
    assert _shown(tmp_path).keys() == {"first", "second"}


@pytest.mark.parametrize(
    ("host", "shown"), [("::1", "[::1]"), ("::", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")]
)  # fmt: skip
def test_an_address_is_given_so_that_it_can_be_asked(tmp_path: Path, host: str, shown: str) -> None:
    state = MetricsState(clock=lambda: 1.0)
    state.observe(make.hello("r"))
    exporter = Exporter(state)
    try:
        exporter.start(host, 0)
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    try:
        targets.announce(tmp_path, _endpoint("r", metrics_url=exporter.url))
        (target,) = _shown(tmp_path)["r"]
        assert target == exporter.target
        assert target.rpartition(":")[0] == shown
        assert 'fp8watch_run_state{run="r",state="running"}' in make.scrape(f"http://{target}/metrics")
    finally:
        exporter.stop()
