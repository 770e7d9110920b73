"""Other tools' names for the scalars that detectors read: Megatron, torchtitan, Transformers, Lightning, NeMo, W&B."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.replay.lines import shown
from fp8watch.replay.readers.without_loss import WithoutLoss
from fp8watch.replay.recording import Attempts

ALIASES = {
    "step": (
        "step", "_step", "global_step", "iteration", "train/global_step", "trainer/global_step", "consumed_steps",
    ),
    "loss": (
        "loss", "train/loss", "train_loss", "lm loss", "training_loss", "train_loss_step", "reduced_train_loss",
        "lm-loss-training/lm loss", "loss_metrics/global_avg_loss", "train/ce loss", "train/crossentropyloss",
        "loss_step", "train/loss_step", "training/loss", "loss/train",
    ),
    "grad_norm": (
        "grad_norm", "train/grad_norm", "grad norm", "gradient_norm", "grad-norm", "optim/total_grad_norm",
        "grad-norm/grad-norm", "grad_2.0_norm_total", "train/gradient_norm", "grad_norm_step", "training/grad_norm",
    ),
    "learning_rate": (
        "lr", "learning_rate", "train/learning_rate", "learning rate", "train/lr", "learning-rate",
        "learning-rate/learning-rate", "optim/lr", "optim/learning_rate_group0",
    ),
    "reference_loss": ("reference_loss",),
    "loss_scale": ("loss_scale", "loss-scale", "loss scale", "loss-scale/loss-scale"),
}  # fmt: skip
"""Our scalar -> names in lower case, the more common ones first."""
TOLD = frozenset({"loss", "grad_norm"})
"""Scalars with a note if a log has them more than once, because findings depend on which one is read."""
NAMES = {name: key for key, names in ALIASES.items() for name in names}


def columns_of(header: Iterable[str]) -> dict[str, int]:
    """Our scalar -> position in a header, of the first of its known names that is there."""
    lower = [cell.strip().lower() for cell in header]
    found = {key: next((lower.index(name) for name in names if name in lower), -1) for key, names in ALIASES.items()}
    if found["learning_rate"] < 0:
        found["learning_rate"] = next((at for at, cell in enumerate(lower) if meaning(cell) == "learning_rate"), -1)
    return {key: position for key, position in found.items() if position >= 0}


@functools.lru_cache(maxsize=4096)
def meaning(name: str) -> str | None:
    """Our scalar for another tool's name; None: no detector reads it."""
    lower = name.lower()
    # Lightning names a learning rate after its optimizer (`lr-AdamW`, `lr-AdamW/pg1`).
    return NAMES.get(lower) or ("learning_rate" if lower.startswith("lr-") else None)


def doubled(header: Iterable[str], found: Mapping[str, int]) -> Iterator[tuple[str, str, list[str]]]:
    """(our scalar, the column that is read, the other columns of it), for each scalar with several columns."""
    cells = [cell.strip() for cell in header]
    for key, position in found.items():
        others = [at for at, cell in enumerate(cells) if at != position and meaning(cell) == key]
        if others and key in TOLD:
            taken, *passed = (f"{cells[at]} (column {at + 1})" for at in [position, *others])
            yield key, taken, passed


class OneName:
    """Chooses among several names for one scalar in a stream of named values: takes the first that comes, and ignores
    the others with one note each."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._taken: dict[str, str] = {}
        self._passed: set[str] = set()

    def may_be(self, key: str, name: str) -> bool:
        """Whether this is the chosen name, or could become it. Does not choose: a null value decides nothing."""
        return self._taken.get(key, name) == name

    def takes(self, key: str, name: str, where: str) -> bool:
        """Whether this is the chosen name for the scalar; chooses it if none is. `where`: `file:line` of the value."""
        taken = self._taken.setdefault(key, name)
        if taken != name and name not in self._passed:
            self._passed.add(name)
            if key in TOLD:
                self._notes.append(several(where, key, taken, [name]))
        return taken == name


def several(where: str, key: str, taken: str, others: Iterable[str]) -> str:
    """The note on a scalar that a log has under several names."""
    return f"{where}: {key}: {shown(taken)} is read; ignored: {', '.join(map(shown, others))}"


def number(value: object) -> float:
    """A number, also as text (`NaN`, `Infinity`). Raises `ValueError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{_shown(value)} is not a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{_shown(value)} is not a number") from None


def whole(value: object) -> int:
    """A step. Raises `ValueError` for anything but a whole number from 0."""
    step = number(value)
    if not math.isfinite(step) or step != int(step) or step < 0:
        raise ValueError(f"{_shown(value)} is no whole number from 0")
    return int(step)


def _shown(value: object) -> str:
    try:
        return shown(repr(value))
    except ValueError:  # an integer of more digits than Python writes
        return "an integer of thousands of digits"


class Rows:
    """Makes samples from the rows of a log: consecutive rows of one step are merged, the last value counts unless an
    earlier one was not finite.

    Lightning and W&B write one row per call, so the loss may be in one row and the learning rate in the next; other
    loggers write a row twice.
    """

    def __init__(self, path: Path, notes: list[str], empty: str = "null", why_empty: str = "") -> None:
        """`notes`: gets the notes; `empty`, `why_empty`: how and why a missing loss is shown in this log."""
        self._path = path
        self._notes, self._empty, self._why_empty = notes, empty, why_empty
        self._without = WithoutLoss()
        self._attempts = Attempts()
        self._has_loss = self._has_rows = False
        self._step = -1
        self._where = ""
        self._scalars: dict[str, float] = {}

    def row(
        self, step: int, scalars: dict[str, float], where: str, *, is_empty: bool = False, has_scores: bool = False
    ) -> Iterator[Sample]:
        """Add the next row, at `where` (`file:line`); yields the previous step's sample if this row begins a new step.
        `is_empty` and `has_scores` as in `WithoutLoss`."""
        self._has_rows = True
        self._without.row(step, where, has_loss="loss" in scalars, is_empty=is_empty, has_scores=has_scores)
        if not scalars:
            return
        self._has_loss = self._has_loss or "loss" in scalars
        if step == self._step and self._scalars:
            if self._scalars.keys() & scalars.keys():
                self._attempts.repeat(step, where)
            # A row that repeats the step does not replace a NaN or infinity.
            broken = {name: value for name, value in self._scalars.items() if not math.isfinite(value)}
            self._scalars = self._scalars | scalars | broken
            return
        yield from self.flush()
        self._step, self._scalars, self._where = step, scalars, where

    def flush(self) -> Iterator[Sample]:
        """The sample of the last step."""
        if self._scalars:
            scalars, self._scalars = self._scalars, {}
            yield self._attempts.sample(self._step, scalars, self._where)

    def cut_off(self) -> Iterator[Sample]:
        """The sample of the last step, when the log cannot be read further."""
        yield from self.flush()
        self._say()

    def _say(self) -> None:
        remark = self._without.remark(self._empty, self._why_empty) if self._has_loss else None
        if remark is not None:
            self._notes.append(remark)

    def finish(self, names: Iterable[str] = ()) -> Iterator[Sample]:
        """The sample of the last step, at the end of the log. `names`: the names of its values, if known.

        Raises `BadInput` if no row has a loss or steps mostly do not grow: otherwise the log would pass for one without
        findings.
        """
        yield from self.cut_off()
        if self._has_rows and not self._has_loss:
            known = ", ".join(map(shown, names))
            raise BadInput([f"{self._path}:1: loss: no row has one{known and '; there are: ' + known}"])
        self._attempts.check()
