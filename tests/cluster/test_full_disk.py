"""A file system without a free block, by the kernel: the spool keeps order in memory, the store counts; both go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hand_made as make
import isolation
import pytest

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import StepFrame
from fp8watch_agent.guarded_store import GuardedStore
from fp8watch_agent.spool import Entry, Spool

pytestmark = pytest.mark.skipif(bool(isolation.why_no_disk()), reason=isolation.why_no_disk() or "-")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with isolation.small_disk(tmp_path / "disk", 4) as folder:
        yield folder


def entry(number: int) -> Entry:
    return Entry("r", True, number.to_bytes(4, "big") * 500)


def numbers(spool: Spool) -> list[int]:
    found = []
    while not spool.is_empty and (some := spool.peek(16)):
        found += [int.from_bytes(item.data[:4], "big") for item in some]
        spool.drop(len(some))
    return found


def test_the_spool_loses_nothing_to_a_full_disk_and_writes_again(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(disk / "spool", 2**22)
    for number in range(100):
        spool.put(entry(number))
    isolation.fill(disk)
    for number in range(100, 300):
        spool.put(entry(number))
    assert 0 < spool.errors <= 200
    assert caplog.text.count("holding the newest in memory") == 1
    isolation.empty(disk)
    assert numbers(spool) == list(range(300))
    for number in range(300, 400):
        spool.put(entry(number))
    spool.close()
    successor = Spool(disk / "spool", 2**22)
    assert numbers(successor) == list(range(300, 400)), "on disk again"
    assert spool.lost == successor.lost == {}


def test_the_store_counts_what_a_full_disk_does_not_take_and_goes_on(disk: Path) -> None:
    failures: list[str] = []
    store = GuardedStore(SqliteStore(disk / "store.sqlite"), lambda run, reason: failures.append(reason))
    columns = {name: [1.0] * 200 for name in ("amax", "scale")}
    store.append("r", [make.frame("r", 1, 200, **columns)])
    isolation.fill(disk)
    for step in range(2, 400):
        store.append("r", [make.frame("r", step, 200, **columns)])
    assert any("full" in reason for reason in failures)
    isolation.empty(disk)
    seen = len(failures)
    store.append("r", [make.frame("r", 400, 200, **columns)])
    assert len(failures) == seen
    steps = [frame.step for frame in store.read("r", StepFrame)]
    assert (steps[0], steps[-1]) == (1, 400)
    assert len(steps) == 400 - seen
    store.close()
