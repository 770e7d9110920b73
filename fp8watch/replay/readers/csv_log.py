"""CSV with a header: `step,loss[,grad_norm][,lr]`, `nan` and `inf` as text, an empty cell for not logged.

Other columns are passed over. Usual other names of the four are understood (`_step`, `train/loss`, ...), so an
export of a tracking service reads as it is.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.replay.recording import Attempts, Recording

ALIASES = {
    "step": ("step", "_step", "global_step", "iteration", "train/global_step"),
    "loss": ("loss", "train/loss", "train_loss", "lm loss", "training_loss"),
    "grad_norm": ("grad_norm", "train/grad_norm", "grad norm", "gradient_norm"),
    "learning_rate": ("lr", "learning_rate", "train/learning_rate", "learning rate", "train/lr"),
}


def read(path: Path) -> Recording:
    """The run in a CSV file."""
    return Recording(run=path.stem, source="csv", samples=_samples(path))


def _samples(path: Path) -> Iterator[Sample]:
    attempts = Attempts()
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as handle:
        rows = csv.reader(handle)
        header = [cell.strip().lower() for cell in next(rows, [])]
        where = {key: next((header.index(n) for n in names if n in header), -1) for key, names in ALIASES.items()}
        missing = [key for key in ("step", "loss") if where[key] < 0]
        if missing:
            raise BadInput([f"{path}:1: {key}: no such column in the header" for key in missing])
        try:
            for cells in rows:
                if any(cell.strip() for cell in cells):
                    yield _sample(path, rows.line_num, cells, where, len(header), attempts)
        except csv.Error as error:
            raise BadInput([f"{path}:{rows.line_num}: row: {error}"]) from error


def _sample(path: Path, line: int, cells: list[str], where: dict[str, int], width: int, attempts: Attempts) -> Sample:
    problems: list[str] = []
    if len(cells) != width:
        raise BadInput([f"{path}:{line}: row: {len(cells)} cells, the header has {width}"])
    scalars: dict[str, float] = {}
    step = 0
    for key, column in where.items():
        text = cells[column].strip() if column >= 0 else ""
        if not text:
            if key == "step":
                problems.append(f"{path}:{line}: step: empty")
            continue
        try:
            value = float(text)
        except ValueError:
            problems.append(f"{path}:{line}: {key}: {text!r} is not a number")
            continue
        if key != "step":
            scalars[key] = value
        elif not math.isfinite(value) or value != int(value) or value < 0:
            problems.append(f"{path}:{line}: step: {text!r} is no whole number from 0")
        else:
            step = int(value)
    if problems:
        raise BadInput(problems)
    return attempts.sample(step, scalars)
