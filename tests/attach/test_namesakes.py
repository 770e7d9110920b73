"""Two that train under one run name at once are told of each other; a run that goes on under its name is not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watched_training import Trainer

import fp8watch
from fp8watch.training import namesake

HOLDER = """
import sys
from pathlib import Path
from fp8watch.training import namesake
print(namesake.claim(Path(sys.argv[1]), int(sys.argv[2]))[0], flush=True)
sys.stdin.readline()
"""
FORKING = HOLDER.replace(
    "sys.stdin.readline()",
    """
import os
worker = os.fork()
if worker:
    print(worker, flush=True)
    os._exit(0)
sys.stdin.readline()
""",
)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "is the name of" in record.message]


def holder(folder: Path, rank: int = 0, program: str = HOLDER) -> subprocess.Popen[str]:
    """A process that has claimed it."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def end(process: subprocess.Popen[str], *, kill: bool = False) -> None:
    process.kill() if kill else process.communicate("\n", timeout=20)
    process.wait(timeout=20)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def test_a_second_watch_of_the_name_in_this_process_is_said(
    channel: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Trainer(), Trainer()
    watch = fp8watch.attach(first.model, first.optimizer, run="same")
    assert said(caplog) == []
    other = fp8watch.attach(second.model, second.optimizer, run="same")
    (line,) = said(caplog)
    assert "run same is the name of another watch of this process too" in line
    assert "attach(..., run=...)" in line
    first.steps(watch, 2)
    second.steps(other, 2)
    assert (watch.global_step, other.global_step) == (2, 2)
    watch.detach()
    third = Trainer()
    fp8watch.attach(third.model, third.optimizer, run="same")
    assert len(said(caplog)) == 2, "the second one is still there"


def test_teacher_and_student_have_a_name_each(channel: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    watches = []
    for run in ("teacher", "student"):
        trainer = Trainer()
        watches.append((trainer, fp8watch.attach(trainer.model, trainer.optimizer, run=run)))
    for trainer, watch in watches:
        trainer.steps(watch, 2)
    assert said(caplog) == []
    assert [watch.attempt for _, watch in watches] == [0, 0]


def test_the_name_of_the_environment_counts_as_well(
    channel: Callable[[], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8WATCH_RUN", "job 7")
    for _ in range(2):
        trainer = Trainer()
        fp8watch.attach(trainer.model, trainer.optimizer)
    assert "run job-7 is the name of" in said(caplog)[0]


def test_a_run_that_goes_on_under_its_name_after_its_end_is_no_namesake(
    channel: Callable[[], Any], caplog: pytest.LogCaptureFixture, trainer: Trainer, tmp_path: Path
) -> None:
    for attempt in range(3):
        watch = fp8watch.attach(trainer.model, trainer.optimizer, run="again")
        assert watch.attempt == attempt
        watch.detach()
    folder = tmp_path / "fp8watch" / "runs" / "again"
    for kill in (False, True):
        end(holder(folder), kill=kill)
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="again")
    assert watch.attempt == 3
    assert said(caplog) == []


def test_another_process_of_the_name_is_named(
    channel: Callable[[], Any], caplog: pytest.LogCaptureFixture, trainer: Trainer, tmp_path: Path
) -> None:
    caplog.set_level(logging.WARNING, "fp8watch")
    process = holder(tmp_path / "fp8watch" / "runs" / "same")
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="same")
    (line,) = said(caplog)
    assert f"run same is the name of process {process.pid} on " in line
    end(process)
    watch.detach()
    caplog.clear()
    fp8watch.attach(trainer.model, trainer.optimizer, run="same")
    assert said(caplog) == []


def test_another_rank_of_the_run_is_none(tmp_path: Path) -> None:
    other_rank = holder(tmp_path, rank=1)
    who, release = namesake.claim(tmp_path, 0)
    assert who == ""
    release()
    later = holder(tmp_path)
    assert namesake.claim(tmp_path, 0)[0].startswith(f"process {later.pid} on ")
    end(later)
    end(other_rank)


def test_a_worker_that_outlives_its_trainer_holds_nothing(tmp_path: Path) -> None:
    """Those of a data loader are forked and have all its descriptors."""
    process = holder(tmp_path, program=FORKING)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.wait(timeout=20)
    os.kill(worker, 0)
    assert namesake.claim(tmp_path, 0)[0] == ""
    end(process)


def test_a_folder_that_cannot_be_written_or_locked_is_no_reason_not_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert namesake.claim(tmp_path / "file" / "run", 0)[0] == ""
    monkeypatch.setattr(namesake, "is_on_network", lambda _: True)
    monkeypatch.setattr("fcntl.lockf", lambda *_: pytest.fail("it may have to be waited for"))
    assert namesake.claim(tmp_path, 0)[0] == ""


def test_a_folder_under_another_name_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    _, release = namesake.claim(tmp_path / "run", 0)
    who, release_second = namesake.claim(tmp_path / "link", 0)
    assert who == namesake.OURS
    release_second()
    release_second()
    assert another_sees(tmp_path / "run") == f"process {os.getpid()} on"
    release()
    assert another_sees(tmp_path / "run") == ""


def test_what_a_link_in_the_place_of_the_file_leads_to_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    (tmp_path / "attached-0.lock").symlink_to(tmp_path / "precious")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert namesake.claim(tmp_path, 0)[0] == ""
    assert namesake.claim(tmp_path / "loop", 0)[0] == ""
    assert (tmp_path / "precious").read_text() == "data"


def another_sees(folder: Path) -> str:
    """Who has it in the eyes of another process, without its host."""
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, str(folder), "0"], input="\n", capture_output=True, text=True, check=True
    )
    return done.stdout.strip().rpartition(" ")[0]
