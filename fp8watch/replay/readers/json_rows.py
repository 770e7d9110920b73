"""Rows of JSON: a Weights & Biases history (`wandb-history.jsonl`, or `scan_history` saved as lines or one list), and
any log with one JSON object per line that has a step and a loss.

W&B writes NaN and infinity as text. Rows without a loss, gradient norm or learning rate (evaluations, system metrics)
are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.replay.lines import beginning, lines, shown
from fp8watch.replay.readers.names import OneName, Rows, meaning, number, whole
from fp8watch.replay.readers.without_loss import is_of_evaluation
from fp8watch.replay.recording import Recording

LIMIT_BYTES = 1 << 29
"""Largest file with one list, which cannot be read in parts; a file of lines may have any length."""

MAX_NAMES = 32
"""Most keys that are named if none of them is a loss."""


def read_lines(path: Path) -> Recording:
    """The run in a file with one object per line."""
    return _recording(path, _objects(path))


def read_list(path: Path) -> Recording:
    """The run in a file that is one list of objects."""
    return _recording(path, _items(path))


def _recording(path: Path, rows: Iterator[tuple[str, Any]]) -> Recording:
    notes: list[str] = []
    return Recording(run=_name(path), source="wandb", samples=_joined(path, rows, notes), notes=notes)


def looks_like_rows(head: str) -> bool:
    """Whether a text begins with a JSON object that has a step."""
    line = head.lstrip("\ufeff \t\r\n").partition("\n")[0]
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and any(meaning(str(key)) == "step" for key in row)


def _name(path: Path) -> str:
    """The run's name. W&B gives every file the same name; the folder has the run's."""
    if not path.stem.startswith("wandb-history"):
        return path.stem
    folder = path.resolve().parent
    return folder.parent.name if folder.name == "files" else folder.name


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    for count, line in enumerate(lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{count}"
        try:
            yield where, loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput([f"{where}: json: {reason(error)}"]) from error


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    if (size := path.stat().st_size) > LIMIT_BYTES:
        raise BadInput([f"{path}:1: json: {size} bytes, more than the {LIMIT_BYTES} that are read at once; use lines"])
    try:
        rows = loads(path.read_text(encoding=beginning(path, 4).encoding, errors="replace"))
    except (ValueError, RecursionError) as error:
        raise BadInput([f"{path}:{getattr(error, 'lineno', 1)}: json: {reason(error)}"]) from error
    if not isinstance(rows, list):
        raise BadInput([f"{path}:1: json: a list of rows is wanted"])
    for count, row in enumerate(rows):
        yield f"{path}:1: [{count}]", row


def _joined(path: Path, rows: Iterator[tuple[str, Any]], notes: list[str]) -> Iterator[Sample]:
    joined, one_name = Rows(path, notes), OneName(notes)
    names = dict[str, None]()
    try:
        for where, row in rows:
            step, scalars = _row(where, row, one_name)
            if len(names) < MAX_NAMES:
                names |= dict.fromkeys(map(str, row))
            is_empty = step is not None and "loss" not in scalars and _has_null_loss(row, one_name)
            yield from joined.row(step or 0, scalars, where, is_empty=is_empty, has_scores=_has_scores(row))
        if not names:
            raise BadInput([f"{path}:1: rows: there are none"])
    except BadInput:
        yield from joined.cut_off()
        raise
    yield from joined.finish(list(names)[:MAX_NAMES])


def _has_null_loss(row: dict[str, Any], one_name: OneName) -> bool:
    return any(
        value is None and meaning(name) == "loss" and one_name.may_be("loss", name) for name, value in row.items()
    )


def _has_scores(row: dict[str, Any]) -> bool:
    return any(value is not None and meaning(name) is None and is_of_evaluation(name) for name, value in row.items())


def _row(where: str, row: Any, one_name: OneName) -> tuple[int | None, dict[str, float]]:
    if not isinstance(row, dict):
        raise BadInput([f"{where}: row: an object is wanted, found {type(row).__name__}"])
    scalars: dict[str, float] = {}
    step: int | None = None
    problems = []
    for name, value in row.items():
        key = meaning(str(name))
        if key is None or value is None or not (key == "step" or one_name.takes(key, str(name), where)):
            continue
        try:
            if key != "step":
                scalars[key] = number(value)
            elif step is None or name == "_step":
                step = whole(value)
        except ValueError as error:
            problems.append(f"{where}: {shown(str(name))}: {error}")
    if step is None and scalars and not problems:
        problems.append(f"{where}: step: missing")
    if problems:
        raise BadInput(problems)
    return step, scalars


def loads(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError` or `RecursionError`."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)  # takes bare NaN and Infinity, which Python writes and the standard does not allow


def reason(error: Exception) -> str:
    """Why a text is not JSON, without the library's advice to programmers."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    return str(error).partition(";")[0]
