"""CSV with a header: `step,loss[,grad_norm][,lr]`, `nan` and `inf` as text, an empty cell for not logged.

Other columns are passed over. Usual other names are understood (`fp8watch.replay.readers.names`), so an export of
Weights & Biases, Lightning's `metrics.csv` and the like read as they are. A table that W&B draws for several runs
(`Step, "run - train/loss", "run - train/loss__MIN", ...`) gives one run for each.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.replay.lines import lines
from fp8watch.replay.readers.names import NAMES, Rows, columns_of
from fp8watch.replay.recording import Recording

_SEPARATOR = " - "
"""Between run and metric in the header of a chart's export."""


def read(path: Path) -> Recording:
    """The run in a CSV file, or the first of its runs. Raises `BadInput` when the header cannot be read."""
    return read_all(path)[0]


def read_all(path: Path) -> list[Recording]:
    """The run in a CSV file, or the runs. Raises `BadInput` when the header cannot be read."""
    try:
        header = next(csv.reader(itertools.islice(lines(path), 1)), [])
    except csv.Error as error:
        raise BadInput([f"{path}:1: row: {error}"]) from error
    found = columns_of(header)
    if "step" in found and "loss" not in found and (runs := _runs(header, found["step"])):
        return [Recording(run=run, source="wandb", samples=_samples(path, where)) for run, where in runs.items()]
    return [Recording(run=path.stem, source="csv", samples=_samples(path, found))]


def _runs(header: list[str], step: int) -> dict[str, dict[str, int]]:
    """Run -> columns, of a chart's export."""
    runs: dict[str, dict[str, int]] = {}
    for position, cell in enumerate(header):
        run, separator, metric = cell.strip().rpartition(_SEPARATOR)
        key = NAMES.get(metric.lower())
        if separator and key is not None and key != "step":
            runs.setdefault(run, {"step": step}).setdefault(key, position)
    return {run: where for run, where in runs.items() if "loss" in where}


def _samples(path: Path, where: dict[str, int]) -> Iterator[Sample]:
    rows = csv.reader(lines(path))
    joined = Rows()
    try:
        width = len(next(rows, []))
        missing = [key for key in ("step", "loss") if key not in where]
        if missing:
            raise BadInput([f"{path}:1: {key}: no such column in the header" for key in missing])
        for cells in rows:
            if any(cell.strip() for cell in cells):
                row = _row(path, rows.line_num, cells, where, width)
                yield from joined.row(*row, f"{path}:{rows.line_num}")
    except csv.Error as error:
        yield from joined.flush()
        raise BadInput([f"{path}:{max(1, rows.line_num)}: row: {error}"]) from error
    except BadInput:
        yield from joined.flush()
        raise
    yield from joined.finish()


def _row(path: Path, line: int, cells: list[str], where: dict[str, int], width: int) -> tuple[int, dict[str, float]]:
    problems: list[str] = []
    if len(cells) != width:
        raise BadInput([f"{path}:{line}: row: {len(cells)} cells, the header has {width}"])
    scalars: dict[str, float] = {}
    step: int | None = None
    for key, column in where.items():
        text = cells[column].strip()
        if not text:
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
    if step is None and not problems and scalars:
        problems.append(f"{path}:{line}: step: empty")
    if problems:
        raise BadInput(problems)
    return step or 0, scalars
