"""How ranks agree before a save: if ranks wait for each other during it, all of them begin or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from fp8watch.checkpoints.bit_sums import LATEST
from fp8watch.checkpoints.storage import Storage
from fp8watch.errors import CheckpointError


class Together(Protocol):
    """This rank's link to the others. Its methods do not raise."""

    algorithm: str
    """The latest checksum algorithm that all ranks are known to know (`fp8watch.checkpoints.bit_sums`)."""

    def all_begin(self, about: str, cannot: str) -> str:
        """Called once by every rank with the same `about`; waits up to a limit. `cannot`: why this rank cannot begin.

        Returns why no rank begins, the same on all ranks; empty: all begin.
        """

    def declined(self) -> str:
        """Why a rank saves no checkpoints at all in this run; empty: no rank has reported that."""


class Beginning:
    """Asks the other ranks before each save, if that is needed."""

    def __init__(self, storage: Storage, together: Together | None, world_size: int) -> None:
        self._together = together if world_size > 1 else None
        self._is_asked = world_size > 1 and storage.writes_own_files
        self._is_needed = self._is_asked and storage.name == "dcp"
        self.algorithm = LATEST if self._together is None else self._together.algorithm
        """Of the parameters' checksum."""
        self._times: Counter[tuple[int, int]] = Counter()

    def question(self, attempt: int, step: int) -> Callable[[str], str]:
        """The function that asks about the save of this step, to be called once (see `Underway.begin`).

        Raises `CheckpointError` when another rank saves no checkpoints at all.
        """
        if self._together is not None and (declined := self._together.declined()):
            raise CheckpointError(f"checkpoint of step {step} could not be saved: {declined}")
        if not self._is_asked:
            return str
        if self._together is None:
            missing = "ranks cannot ask each other whether all of them begin: torch.distributed is not initialised"
            return (lambda cannot: cannot or missing) if self._is_needed else str
        together = self._together
        self._times = Counter({key: times for key, times in self._times.items() if key == (attempt, step)})
        self._times[attempt, step] += 1
        about = f"{attempt}/{step}/{self._times[attempt, step]}"
        return lambda cannot: together.all_begin(about, cannot)
