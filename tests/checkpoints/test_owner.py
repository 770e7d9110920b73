"""Two that are alive do not save into one directory."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from plain_run import PlainRun

from fp8watch.checkpoints import owner
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.errors import CheckpointError


def second(run: PlainRun, name: str = "other") -> CheckpointManager:
    return CheckpointManager(run.config, run.parts, run=name, attempt=lambda: 0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner.Owner.__init__, "__defaults__", (0.3,))


def test_a_second_one_in_this_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    run.step()
    name = run.save()
    with pytest.raises(CheckpointError, match=r"run r of this process saves into .* already"):
        second(run)
    (tmp_path / "link").symlink_to(tmp_path)
    run.config = type(run.config)(tmp_path / "link")
    with pytest.raises(CheckpointError, match="already"):
        second(run)
    run.manager.label(name, "tainted", "loss spike")
    run.manager.close(0.0)
    assert not (tmp_path / owner.NAME).exists()
    assert second(run).records()[0].label == "tainted"


def test_one_that_is_forgotten_keeps_nobody_out(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    del run.manager
    gc.collect()
    assert second(run).records() == []


HOLDER = textwrap.dedent(
    """
    import os, sys, time
    sys.path.insert(0, sys.argv[2])
    from pathlib import Path
    from plain_run import PlainRun
    run = PlainRun(Path(sys.argv[1]))
    run.step(); run.save()
    if sys.argv[3] == "forks" and os.fork() == 0:
        os.close(1)
        time.sleep(20)
        os._exit(0)
    print("holds", flush=True)
    time.sleep(60)
    """
)


@pytest.mark.parametrize("kind", ["alone", "forks"])
def test_another_process_is_named_and_keeps_nobody_out_once_it_is_killed(tmp_path: Path, kind: str) -> None:
    """Also when a worker that it has forked outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(Path(__file__).parent), kind], stdout=subprocess.PIPE,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "holds\n"
        with pytest.raises(CheckpointError, match=rf"run r \(process {process.pid} on .*\) saves into"):
            PlainRun(tmp_path)
        process.kill()
        process.wait()
        run = PlainRun(tmp_path)
        assert [record.step for record in run.manager.records()] == [1]
        run.step()
        run.manager.save(2)
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def test_one_that_is_about_to_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PlainRun(tmp_path)
    waits = iter([True, True])

    def busy_twice(self: owner.Owner, name: str) -> str | None:
        return "another process" if next(waits, False) else real(self, name)

    real = owner.Owner._lock_now
    monkeypatch.setattr(owner.Owner, "_lock_now", busy_twice)
    assert run.open().records() == []


def test_a_file_system_that_cannot_lock_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(owner.fcntl, "lockf", no_locks)
    run = PlainRun(tmp_path)
    assert any("cannot be locked" in note and "No locks" in note for note in run.manager.notes)
    run.step()
    run.save()
    with pytest.raises(CheckpointError, match="already"):
        second(run)


def test_ranks_that_only_read_need_no_lock(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    other = CheckpointManager(run.config, run.parts, run="r", attempt=lambda: 0, rank=1, world_size=2)
    assert other.records() == []
    other.close(0.0)
    assert (tmp_path / owner.NAME).exists()
