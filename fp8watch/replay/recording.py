"""A recorded run, whatever wrote it: a name and its steps in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8watch.detect.base import Sample

FILTERED_NOTE = "log source: the trainer may have repaired or averaged non-finite values before logging them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One run. Iterating `samples` may raise `BadInput` at the row that is wrong; what came before it counts."""

    run: str
    source: str
    """Which reader made it: csv, trainer_state, megatron, torchtitan, tensorboard, fp8watch."""
    samples: Iterator[Sample]
    may_be_filtered: bool = True
    """The values come from a log, not from the tensors (a trainer may log the mean instead of a NaN)."""


class Attempts:
    """Numbers the attempts of a log: a step that does not grow means that the run went back and on again."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._attempt = 0

    def sample(self, step: int, scalars: dict[str, float]) -> Sample:
        """The next logged step."""
        if self._last is not None and step <= self._last:
            self._attempt += 1
        self._last = step
        return Sample(attempt=self._attempt, step=step, scalars=scalars)
