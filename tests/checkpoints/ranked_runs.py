"""Ranks of one job in one process and one directory, each a run of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from plain_run import PlainRun

from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.together import Together


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ranks:
    """`world_size` runs whose managers believe to be ranks of one job."""

    _writers: ClassVar[weakref.WeakValueDictionary[Path, CheckpointManager]] = weakref.WeakValueDictionary()

    def __init__(
        self, root: Path, world_size: int = 2, together: Callable[[int], Together] | None = None, **config: Any
    ) -> None:
        self.clock = Clock()
        self.runs = []
        if (before := self._writers.get(root)) is not None:  # ended, as it is for all ranks of a new start
            before.close(0.0)
        for rank in range(world_size):
            run = PlainRun(root, opens=False, **config)
            run.manager = CheckpointManager(
                run.config,
                run.parts,
                run="r",
                attempt=lambda: 0,
                monotonic=self.clock,
                rank=rank,
                world_size=world_size,
                together=None if together is None else together(rank),
            )
            self.runs.append(run)
        self._writers[root] = self.runs[0].manager

    def __iter__(self) -> Any:
        return iter(self.runs)

    def step(self, steps: int = 1) -> None:
        for run in self.runs:
            torch.manual_seed(run.step_number)  # copies stay copies
            run.run(steps)

    def save(self, step: int) -> list[str]:
        """Every rank saves, then every rank comes to its next boundary."""
        labels = [run.manager.save(step).label for run in self.runs]
        for run in self.runs:
            run.manager.poll()
        return labels


def name_of(step: int) -> str:
    return f"step-{step:08d}-attempt-0"
