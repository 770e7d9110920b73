"""CSV with a header: `step,loss[,grad_norm][,lr]`, `nan` and `inf` as text, an empty cell for a value not logged.
Semicolons or tabs separate cells if the header has no comma.

Other columns are ignored. Common other names are understood (`fp8watch.replay.readers.names`), so exports of Weights &
Biases, Lightning's `metrics.csv` and the like can be read unchanged. A W&B chart of several runs
(`Step, "run - train/loss", "run - train/loss__MIN", ...`) gives one recording per run.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.replay.lines import lines, shown
from fp8watch.replay.readers.names import Rows, columns_of, doubled, meaning, several
from fp8watch.replay.readers.without_loss import is_of_evaluation
from fp8watch.replay.recording import Recording

MAX_NAMES = 32
"""Most columns that are named in an error about a missing step or loss."""
_SEPARATOR = " - "
"""Separates run and metric in the header of a chart's export."""


def read(path: Path) -> Recording:
    """The run in a CSV file, or the first of several. Raises `BadInput` if the header cannot be read."""
    return read_all(path)[0]


def read_all(path: Path) -> list[Recording]:
    """All runs in a CSV file. Raises `BadInput` if the header cannot be read."""
    try:
        header: list[str] = next(_cells(itertools.islice(lines(path), 1)), [])
    except csv.Error as error:
        raise BadInput([f"{path}:1: row: {error}"]) from error
    found = columns_of(header)
    if "step" in found and "loss" not in found and (runs := _runs(header, found["step"])):
        return [_of_chart(path, header, runs, run) for run in runs]
    notes = [several(f"{path}:1", *item) for item in doubled(header, found)]
    # Lightning gives every log the same name; the folder (version_3) distinguishes them.
    run = path.resolve().parent.name if path.name == "metrics.csv" else path.stem
    return [Recording(run=run or path.stem, source="csv", samples=_samples(path, found, notes), notes=notes)]


def looks_like_rows(head: str) -> bool:
    """Whether a text begins with a header that has a step and a loss."""
    try:
        found = columns_of(next(_cells(iter(head.splitlines()[:1])), []))
    except csv.Error:
        return False
    return {"step", "loss"} <= found.keys()


def _cells(rows: Iterator[str]) -> Any:
    """The cells of the rows; the first line determines the delimiter."""
    head = next(rows, "")
    delimiter = next((mark for mark in "\t;" if mark in head and "," not in head), ",")
    return csv.reader(itertools.chain([head] if head else [], rows), delimiter=delimiter)


def _runs(header: list[str], step: int) -> dict[str, dict[str, int]]:
    """Run -> columns, in a chart's export."""
    runs: dict[str, dict[str, int]] = {}
    for position, cell in enumerate(header):
        run, separator, metric = cell.strip().rpartition(_SEPARATOR)
        key = meaning(metric)
        if separator and key is not None and key != "step":
            runs.setdefault(run, {"step": step}).setdefault(key, position)
    return {run: where for run, where in runs.items() if "loss" in where}


def _of_chart(path: Path, header: list[str], runs: dict[str, dict[str, int]], run: str) -> Recording:
    """One run of a chart's export. With several, a row has a cell for each run, even if only one logged that step."""
    notes = _notes(path, header, runs[run], run)
    why = f"run {shown(run)} ended, logged other steps than the others, or had a NaN there" if len(runs) > 1 else ""
    return Recording(run=run, source="wandb", samples=_samples(path, runs[run], notes, why), notes=notes)


def _notes(path: Path, header: list[str], where: dict[str, int], run: str) -> list[str]:
    """Notes on a run for which the chart has several metrics that mean the same scalar."""
    own = [cell.strip().rpartition(_SEPARATOR) for cell in header]
    metrics = [metric if name == run else "" for name, _, metric in own]
    return [several(f"{path}:1", *item) for item in doubled(metrics, where)]


def _samples(path: Path, where: dict[str, int], notes: list[str], why_empty: str = "") -> Iterator[Sample]:
    rows = _cells(lines(path))  # a csv.reader
    joined = Rows(path, notes, "an empty cell", why_empty)
    try:
        header: list[str] = next(rows, [])
        width = len(header)
        missing = [key for key in ("step", "loss") if key not in where]
        if missing:
            if any("\0" in cell for cell in header):
                raise BadInput([f"{path}:1: header: no text, or UTF-16 without its byte-order mark"])
            if not any(cell.strip() for cell in header):
                raise BadInput([f"{path}:1: header: there is none, the first line is empty"])
            there = ", ".join(shown(cell.strip()) for cell in header[:MAX_NAMES])
            raise BadInput([f"{path}:1: {key}: no such column in the header; there are: {there}" for key in missing])
        scores = [at for at, cell in enumerate(header) if at not in where.values() and is_of_evaluation(cell)]
        for cells in rows:
            if any(cell.strip() for cell in cells):
                step, scalars = _row(path, rows.line_num, cells, where, width)
                is_empty = "loss" not in scalars and bool(cells[where["step"]].strip())
                has_scores = any(cells[at].strip() for at in scores)
                at = f"{path}:{rows.line_num}"
                yield from joined.row(step, scalars, at, is_empty=is_empty, has_scores=has_scores)
    except csv.Error as error:
        yield from joined.cut_off()
        raise BadInput([f"{path}:{max(1, rows.line_num)}: row: {error}"]) from error
    except BadInput:
        yield from joined.cut_off()
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
            problems.append(f"{path}:{line}: {key}: '{shown(text)}' is not a number")
            continue
        if key != "step":
            scalars[key] = value
        elif not math.isfinite(value) or value != int(value) or value < 0:
            problems.append(f"{path}:{line}: step: '{shown(text)}' is no whole number from 0")
        else:
            step = int(value)
    if step is None and not problems and scalars:
        problems.append(f"{path}:{line}: step: empty")
    if problems:
        raise BadInput(problems)
    return step or 0, scalars
