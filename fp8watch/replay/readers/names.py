"""What other tools call the scalars that detectors read: Megatron, torchtitan, Transformers, Lightning, NeMo, W&B."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from fp8watch.detect.base import Sample
from fp8watch.replay.recording import Attempts

ALIASES = {
    "step": (
        "step", "_step", "global_step", "iteration", "train/global_step", "trainer/global_step", "consumed_steps",
    ),
    "loss": (
        "loss", "train/loss", "train_loss", "lm loss", "training_loss", "train_loss_step", "reduced_train_loss",
        "lm-loss-training/lm loss", "loss_metrics/global_avg_loss", "train/ce loss", "train/crossentropyloss",
    ),
    "grad_norm": (
        "grad_norm", "train/grad_norm", "grad norm", "gradient_norm", "grad-norm", "optim/total_grad_norm",
        "grad-norm/grad-norm", "grad_2.0_norm_total", "train/gradient_norm",
    ),
    "learning_rate": (
        "lr", "learning_rate", "train/learning_rate", "learning rate", "train/lr", "learning-rate",
        "learning-rate/learning-rate", "lr-adamw", "lr-adam", "optim/lr", "optim/learning_rate_group0",
    ),
    "loss_scale": ("loss_scale", "loss-scale", "loss scale", "loss-scale/loss-scale"),
}  # fmt: skip
"""Our scalar -> names in lower case, the more usual ones first."""
NAMES = {name: key for key, names in ALIASES.items() for name in names}


def columns_of(header: Iterable[str]) -> dict[str, int]:
    """Our scalar -> position in a header; the first of its usual names that is there."""
    lower = [cell.strip().lower() for cell in header]
    found = {key: next((lower.index(name) for name in names if name in lower), -1) for key, names in ALIASES.items()}
    return {key: position for key, position in found.items() if position >= 0}


def number(value: object) -> float:
    """A number, also as text (`NaN`, `Infinity`). Raises `ValueError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a number") from None


def whole(value: object) -> int:
    """A step. Raises `ValueError` for what is no whole number from 0."""
    step = number(value)
    if not math.isfinite(step) or step != int(step) or step < 0:
        raise ValueError(f"{value!r} is no whole number from 0")
    return int(step)


class Rows:
    """Rows of a log as samples: rows of one step that stand next to each other are one, the last value
    counts unless an earlier one was not finite.

    Lightning and W&B write one row a call, so the loss may stand in one and the learning rate in the next; other
    loggers write a row twice.
    """

    def __init__(self) -> None:
        self._attempts = Attempts()
        self._step = -1
        self._where = ""
        self._scalars: dict[str, float] = {}

    def row(self, step: int, scalars: dict[str, float], where: str) -> Iterator[Sample]:
        """The next row, at `file:line`; the sample of the step before, once this row belongs to another."""
        if not scalars:
            return
        if step == self._step and self._scalars:
            if self._scalars.keys() & scalars.keys():
                self._attempts.repeat(step, where)
            # A number that is none is not taken back by a row that repeats its step.
            broken = {name: value for name, value in self._scalars.items() if not math.isfinite(value)}
            self._scalars = self._scalars | scalars | broken
            return
        yield from self.flush()
        self._step, self._scalars, self._where = step, scalars, where

    def flush(self) -> Iterator[Sample]:
        """The sample of the newest step."""
        if self._scalars:
            scalars, self._scalars = self._scalars, {}
            yield self._attempts.sample(self._step, scalars, self._where)

    def finish(self) -> Iterator[Sample]:
        """The same at the end of the log. Raises `BadInput` when its steps mostly do not grow."""
        yield from self.flush()
        self._attempts.check()
