"""A reader sees the old contents or the new, whatever stops the writer; and what is durable is on the disk first."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from fp8watch.atomic_file import replace_file, replacing, sync_directory
from fp8watch.controller import markers
from fp8watch.transport import endpoint
from fp8watch_agent import incarnation
from fp8watch_agent.spool import Entry, Spool


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is synced and renamed, in order: (`sync` or `rename`, name)."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        seen.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    return seen


@pytest.mark.parametrize("moment", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_whatever_stops_it_leaves_the_old_contents_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: BaseException
) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")

    def stop(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, stop)
        with pytest.raises(type(error)):
            replace_file(path, b"new", durable=True, mode=0o644)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    replace_file(path, b"new", durable=True)
    assert path.read_text() == "new"


def test_a_writer_that_fails_halfway_leaves_the_old_contents_and_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")

    def write(parts: int) -> None:
        with replacing(path, durable=False) as file:
            for number in range(parts):
                file.write(b"%d" % number)
                assert path.read_bytes() == b"old"
            if parts < 2:
                raise ValueError("the third part cannot be made")

    with pytest.raises(ValueError, match="third part"):
        write(1)
    assert [(item, item.read_bytes()) for item in tmp_path.iterdir()] == [(path, b"old")]
    write(3)
    assert [(item, item.read_bytes()) for item in tmp_path.iterdir()] == [(path, b"012")]


def test_durable_is_the_data_then_the_name_then_the_folder(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    replace_file(tmp_path / "file", b"x", durable=True)
    (first, partial), *rest = calls
    assert (first, partial.startswith(".file.")) == ("sync", True)
    assert rest == [("rename", "file"), ("sync", tmp_path.name)]
    calls.clear()
    replace_file(tmp_path / "file", b"x", durable=False)
    assert calls == [("rename", "file")]


def test_permissions_are_those_of_any_new_file_unless_they_are_given(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "ours", b"", durable=False)
        replace_file(tmp_path / "all", b"", durable=False, mode=0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "all").stat().st_mode) == 0o644


def test_many_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([65 + number]) * 4096 for number in range(4)]
    seen: set[bytes] = set()

    def write(content: bytes) -> None:
        for _ in range(30):
            replace_file(path, content, durable=False)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            seen.add(path.read_bytes())
    assert seen <= set(contents)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_that_knows_no_syncing_of_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> Any:
        def fsync(descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(22))  # EINVAL
    replace_file(tmp_path / "file", b"x", durable=True)
    monkeypatch.setattr(os, "fsync", refuse(5))  # EIO
    with pytest.raises(OSError, match="Input/output"):
        sync_directory(tmp_path)


# Who promises what


def test_what_must_outlive_a_power_failure_is_synced_with_its_folder(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    path = markers.write_halted(tmp_path, "r", reason="x", step=3, time_unix=0.0)
    assert calls[1:] == [("rename", "halted.json"), ("sync", path.parent.name)]
    calls.clear()
    incarnation.begin(tmp_path / "spool", 5)
    assert calls[1:] == [("rename", "incarnation"), ("sync", "spool")]
    calls.clear()
    spool = Spool(tmp_path / "spool", limit_bytes=4 * 1024**2)
    spool.put(Entry("r", False, b"hello"))
    for _ in range(9):
        spool.put(Entry("r", True, b"x" * 1024**2))
    spool.close()
    assert ("rename", "000000000001.seg") in calls
    assert ("sync", "spool") in calls
    segment = tmp_path / "spool" / "000000000001.seg"
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600, "shortened or not, what a run sends is its user's"


def test_an_endpoint_can_be_read_by_others_whatever_the_umask(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    before = os.umask(0o077)
    try:
        endpoint.write(
            tmp_path, endpoint.Endpoint(run="r", pid=1, host="h", socket="", metrics_url="", store="", state="live")
        )
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "runs" / "r" / "endpoint.json").stat().st_mode) == 0o644
    assert calls == [("rename", "endpoint.json")], "written anew by every process: nothing waits for the disk"
