"""Runs a plan: starts the trainings, follows them, and waits until the watched run's end has been recorded."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fp8watch.demo.plan import Plan
from fp8watch.demo.processes import Losses, TrainingProcess
from fp8watch.demo.story import Story, has_ended, read_story
from fp8watch.errors import EXIT_HALTED, Fp8watchError
from fp8watch.settings import Settings

REFRESH_SECONDS = 0.5
END_SECONDS = 20.0
"""How long the background process may take to record its end: twice what it allows itself."""


class TrainingFailed(Fp8watchError):
    """A training ended early; the message contains the end of its output."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """What can be shown now."""

    plan: Plan
    watched: Losses
    twin: Losses
    unwatched: Losses | None
    story: Story = field(default_factory=Story)
    ended: str = ""
    """completed or halted; empty while the watched run continues."""


def run_plan(
    plan: Plan,
    *,
    with_unwatched: bool,
    twin: Losses | None = None,
    listener: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Run it to its end; `twin` may come from an earlier plan with the same twin.

    Raises `TrainingFailed`. Never leaves a process of its own behind.
    """
    directory = Settings().dir
    processes: list[TrainingProcess] = []
    with tempfile.TemporaryDirectory(prefix="fp8watch-demo-") as folder:
        scratch = Path(folder)
        try:
            spec = msgspec.structs.replace(plan.watched, checkpoints=str(scratch / "checkpoints"))
            watched = TrainingProcess(spec, scratch / "watched.log")
            processes.append(watched)
            twin_process = None
            if twin is None:
                twin_process = TrainingProcess(plan.twin, scratch / "twin.log")
                processes.append(twin_process)
            unwatched = None
            if with_unwatched:
                unwatched = TrainingProcess(plan.unwatched, scratch / "unwatched.log")
                processes.append(unwatched)
            progress = Progress(
                plan=plan,
                watched=watched.losses,
                twin=twin if twin_process is None else twin_process.losses,  # type: ignore[arg-type]
                unwatched=None if unwatched is None else unwatched.losses,
            )
            _follow(processes, progress, directory, listener)
            _await_end(plan, progress, directory)
        finally:
            for process in processes:
                process.stop()
    progress.story = read_story(directory, plan.run)
    listener(progress)
    return progress


def _follow(
    processes: list[TrainingProcess], progress: Progress, directory: Path, listener: Callable[[Progress], None]
) -> None:
    while True:
        codes = [process.poll() for process in processes]
        for process, code in zip(processes, codes, strict=True):
            if code is None or code == 0:
                continue
            if process.spec.run is not None and code == EXIT_HALTED:
                continue
            raise TrainingFailed(f"{process.errors.stem} ended with exit code {code}:\n{process.error_text()}")
        if codes[0] is not None:
            progress.ended = "halted" if codes[0] == EXIT_HALTED else "completed"
        progress.story = read_story(directory, progress.plan.run)
        listener(progress)
        if None not in codes:
            return
        time.sleep(REFRESH_SECONDS)


def _await_end(plan: Plan, progress: Progress, directory: Path) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not has_ended(directory, plan.run) and time.monotonic() < deadline:
        time.sleep(REFRESH_SECONDS / 2)
