"""The spool keeps order, its bound and what is not a frame, over restarts, cut-off files and full disks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch_agent import spool as module
from fp8watch_agent.spool import Entry, Spool


def frame(number: int, size: int = 8) -> Entry:
    return Entry("r", True, number.to_bytes(8, "big") + bytes(max(0, size - 8)))


def numbers(entries: list[Entry]) -> list[int]:
    return [int.from_bytes(entry.data[:8], "big") for entry in entries]


def drain(spool: Spool) -> list[Entry]:
    found: list[Entry] = []
    while not spool.is_empty:
        some = spool.peek(7)
        if not some:
            break
        found += some
        spool.drop(len(some))
    return found


entries = st.lists(
    st.builds(Entry, run=st.text(max_size=5), is_frame=st.booleans(), data=st.binary(max_size=40)), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(entries, st.lists(st.integers(1, 9), max_size=8), st.booleans())
def test_what_goes_in_comes_out_in_order(given_entries: list[Entry], takes: list[int], is_restarted: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(Path(folder), 10**9)
        found: list[Entry] = []
        for position, entry in enumerate(given_entries):
            spool.put(entry)
            if position < len(takes):
                some = spool.peek(takes[position])
                spool.drop(len(some))
                found += some
        if is_restarted:
            spool.close()
            again = Spool(Path(folder), 10**9)
            rest = drain(again)
            assert rest[-len(given_entries[len(found) :]) :] == given_entries[len(found) :] or not rest
            again.close()
            return  # what was taken from an unfinished segment is given out again: its number tells
        assert found + drain(spool) == given_entries
        assert spool.is_empty
        assert not list(Path(folder).glob("*.seg"))
        spool.close()


def test_a_successor_begins_with_what_was_left(tmp_path: Path) -> None:
    first = Spool(tmp_path, 10**9)
    for number in range(20):
        first.put(frame(number))
    first.close()
    second = Spool(tmp_path, 10**9)
    second.put(frame(20))
    assert numbers(drain(second)) == list(range(21))
    second.close()


def test_over_the_limit_the_oldest_frames_go_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    spool = Spool(tmp_path, 5000)
    for number in range(200):
        spool.put(frame(number, 100))
        if number % 20 == 0:
            spool.put(Entry("r", False, number.to_bytes(8, "big")))
        assert spool.size_bytes <= 5000 + 200
    found = drain(spool)
    kept = numbers([entry for entry in found if entry.is_frame])
    assert kept == list(range(kept[0], 200))
    assert spool.lost["spool_full"] == kept[0] > 100
    assert numbers([entry for entry in found if not entry.is_frame]) == list(range(0, 200, 20))
    spool.close()


def test_a_file_cut_off_in_the_middle_of_an_entry_is_read_up_to_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10**9)
    for number in range(5):
        spool.put(frame(number, 50))
    spool.close()
    (path,) = tmp_path.glob("*.seg")
    os.truncate(path, path.stat().st_size - 20)
    again = Spool(tmp_path, 10**9)
    assert numbers(drain(again)) == [0, 1, 2, 3]
    assert again.lost["damaged"] == 1
    again.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_keeps_the_newest_in_memory_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", 1000)
    spool = Spool(tmp_path, 10**9)
    spool.put(frame(0, 100))

    def is_full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    real_write = os.write
    monkeypatch.setattr(os, "write", is_full)
    for number in range(1, 31):
        spool.put(frame(number, 100))
    monkeypatch.setattr(os, "write", real_write)
    found = numbers(drain(spool))
    assert found[0] == 0
    assert found[1:] == list(range(31 - len(found) + 1, 31))
    assert spool.lost["disk_full"] == 31 - len(found) > 0
    spool.put(frame(99))
    assert numbers(drain(spool)) == [99]
    spool.close()


def test_half_a_write_does_not_hide_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, 10**9)
    spool.put(frame(0, 100))
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real_write(handle, data[:10]))
    spool.put(frame(1, 100))
    monkeypatch.setattr(os, "write", real_write)
    assert numbers(spool.peek(9)) == [0]
    assert numbers(drain(spool)) == [0, 1]
    spool.close()


def test_what_an_agent_left_that_was_killed_while_it_shortened_a_segment_is_removed(tmp_path: Path) -> None:
    first = Spool(tmp_path, 10**9)
    first.put(frame(1))
    first.close()
    left = tmp_path / ".000000000001.seg.77.0a0b0c0d.partial"
    left.write_bytes(b"x" * 100)
    assert numbers(drain(Spool(tmp_path, 10**9))) == [1]
    assert not left.exists()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_disk_too_full_to_shorten_a_segment_loses_nothing_silently(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try fails until the old segment is gone; if the second fails too, what is lost is counted."""
    monkeypatch.setattr(module, "SEGMENT_BYTES", 256)
    spool = Spool(tmp_path, 600)
    original, left = module.replace_file, iter(range(failures))

    def replace_file(path: Path, data: bytes, **options: object) -> None:
        if next(left, None) is not None:
            raise OSError(28, "no space left on device")
        original(path, data, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "replace_file", replace_file)
    kept = [Entry("r", False, number.to_bytes(8, "big")) for number in range(40)]
    for number, entry in enumerate(kept):
        spool.put(frame(number, 40))
        spool.put(entry)
    found = [entry for entry in drain(spool) if not entry.is_frame]
    assert len(found) + spool.lost["disk_full"] == len(kept)
    assert (spool.lost["disk_full"] > 0) is (failures == 2)
    spool.close()
