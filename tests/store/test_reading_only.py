"""A store is read by a user who may write neither the file nor its folder: a running run's, and an ended one's."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import Evaluation

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own, which other users cannot enter."""
    made = Path(tempfile.mkdtemp(prefix="fp8watch-reading-"))
    made.chmod(0o755)
    yield made
    made.chmod(0o700)
    shutil.rmtree(made)


def read_as_nobody(path: Path) -> int:
    """Number of evaluations in the store, read by a user without rights."""
    end, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(end)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            with contextlib.closing(SqliteStore(path, read_only=True)) as store:
                os.write(ours, bytes([len(list(store.read("r", Evaluation)))]))
        os._exit(0)
    os.close(ours)
    answer = os.read(end, 1)
    os.close(end)
    os.waitpid(pid, 0)
    assert answer, "it could not be read"
    return answer[0]


@pytest.mark.skipif(sys.platform != "linux", reason="users by number")
@pytest.mark.parametrize("is_running", [True, False])
def test_a_user_who_may_only_read(folder: Path, is_running: bool) -> None:
    store = SqliteStore(folder / "store.sqlite")
    store.append("r", [Evaluation(run="r", attempt=0, step=step, scores={"a": 1.0}) for step in (1, 2, 3)])
    if not is_running:
        store.close()
        assert not (folder / "store.sqlite-wal").exists()
    folder.chmod(0o555)
    (folder / "store.sqlite").chmod(0o444)
    assert read_as_nobody(folder / "store.sqlite") == 3
    store.close()
