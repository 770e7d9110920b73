"""Where the store lies when FP8WATCH_DIR is fine, unwritable, full or on a network; targets.json; a failing store."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hand_made as make
import pytest

from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.records import RunRecord
from fp8watch.transport import endpoint as endpoints
from fp8watch.transport.endpoint import Endpoint
from fp8watch_agent import filesystem, store_place, targets
from fp8watch_agent.guarded_store import GuardedStore
from fp8watch_agent.options import AgentOptions

MOUNTS = """\
22 1 0:20 / / rw shared:1 - ext4 /dev/root rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 0:41 / /home/local\\040disk rw - xfs /dev/sdb rw
32 22 0:42 / /mnt/bucket rw - fuse.s3fs s3fs rw
33 22 0:43 / /homework rw - ext4 /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/srv/x", False), ("/home/me/.fp8watch", True), ("/home/local disk/x", False), ("/mnt/bucket/a", True),
        ("/homework/a", False), ("/home", True),
    ],
)  # fmt: skip
def test_network_file_systems_are_told_by_the_longest_mount(path: str, expected: bool) -> None:
    assert filesystem.is_network(Path(path), MOUNTS) is expected


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentOptions:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return AgentOptions(socket=tmp_path / "s", directory=tmp_path / "dir", run="r")


@pytest.fixture
def opened(options: AgentOptions) -> Iterator[Any]:
    stores = []

    def open_it() -> store_place.OpenedStore:
        found = store_place.open_store(options, "r")
        stores.append(found.store)
        return found

    yield open_it
    for store in stores:
        store.close()


def test_a_good_folder_holds_the_store(options: AgentOptions, opened: Any) -> None:
    found = opened()
    assert Path(found.path) == options.directory / "runs/r/store.sqlite"
    assert found.warnings == []


def test_a_network_folder_gets_a_pointer_without_a_warning(
    options: AgentOptions, opened: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(filesystem, "is_network", lambda path: True)
    found = opened()
    assert found.path.startswith(str(tmp_path / "state"))
    assert found.endpoint_directory == options.directory
    assert found.warnings == []


@pytest.mark.parametrize("kind", ["a file is in the way", "no space left"])
def test_an_unwritable_or_full_folder_is_one_warning(
    options: AgentOptions, opened: Any, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kind == "no space left":
        real = filesystem.why_unwritable
        monkeypatch.setattr(
            filesystem, "why_unwritable",
            lambda folder: "dir: No space left on device" if options.directory in folder.parents else real(folder),
        )  # fmt: skip
    else:
        options.directory.write_text("not a folder")
    found = opened()
    assert found.path.startswith(str(tmp_path / "state"))
    assert found.endpoint_directory != options.directory
    assert len(found.warnings) == 1
    assert "FP8WATCH_DIR cannot be written" in found.warnings[0]
    assert found.path in found.warnings[0]


def test_with_no_folder_at_all_memory_serves(
    options: AgentOptions, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "why_unwritable", lambda folder: f"{folder}: Read-only file system")
    found = opened()
    assert isinstance(found.store, MemoryStore)
    assert found.path == ""
    assert "nothing of this run will be kept" in found.warnings[0]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), sqlite3.OperationalError("disk full")])
def test_a_store_that_fails_is_counted_and_never_raises(error: Exception) -> None:
    class Broken(MemoryStore):
        def append(self, run: str, records: object) -> None:
            raise error

    failures: list[tuple[str, str]] = []
    store = GuardedStore(Broken(), lambda run, reason: failures.append((run, reason)))
    record = RunRecord(run="r", state="running", hello=make.hello("r"), started_unix=0.0, updated_unix=0.0)
    store.append("r", [record])
    store.append("r", [record])
    assert failures == [("r", str(error))] * 2
    assert list(store.read("r", RunRecord)) == []


def _endpoint(run: str, pid: int, port: int, **changes: Any) -> Endpoint:
    fields = {
        "host": os.uname().nodename,
        "socket": "s",
        "metrics_url": f"http://127.0.0.1:{port}/metrics",
        "store": "x",
    }
    return Endpoint(run=run, pid=pid, **{**fields, **changes})


def test_targets_hold_what_lives_and_nothing_else(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    endpoints.write(tmp_path, _endpoint("live", os.getpid(), 1000))
    endpoints.write(tmp_path, _endpoint("dead", gone.pid, 1001))
    endpoints.write(tmp_path, _endpoint("elsewhere", gone.pid, 1002, host="another-host"))
    endpoints.write(tmp_path, _endpoint("over", os.getpid(), 1003, state="ended", metrics_url=""))
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/endpoint.json").write_text("{")
    targets.refresh(tmp_path)
    groups = json.loads((tmp_path / "targets.json").read_text())
    assert {group["labels"]["__meta_fp8watch_run"]: group["targets"] for group in groups} == {
        "live": ["127.0.0.1:1000"],
        "elsewhere": ["127.0.0.1:1002"],
    }
    assert not list(tmp_path.glob(".targets.json.*"))


def test_an_endpoint_reads_back(tmp_path: Path) -> None:
    endpoint = _endpoint("a/b", 1, 2)
    endpoints.write(tmp_path, endpoint)
    assert endpoints.read(tmp_path, "a/b") == endpoint
    assert endpoints.read(tmp_path, "other") is None
