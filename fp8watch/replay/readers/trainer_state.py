"""Transformers' `trainer_state.json`: the `log_history` that Trainer keeps.

Trainer averages the loss over `logging_steps` and, by default, replaces a non-finite loss by an average of
earlier ones (`logging_nan_inf_filter`): such a series may look clean when the run was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.replay.lines import beginning
from fp8watch.replay.readers.json_rows import loads, reason
from fp8watch.replay.readers.names import Rows, number, whole
from fp8watch.replay.recording import Recording

LIMIT_BYTES = 1 << 29
"""Largest file: a history of some millions of entries. JSON cannot be read in parts."""
MAX_NAMES = 32
"""Most keys that are named if no entry has a loss."""
KEYS = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}


def read(path: Path) -> Recording:
    """The run in a trainer_state.json, named after its folder, or the folder of its checkpoints."""
    folder = path.resolve().parent
    if folder.name.startswith("checkpoint-"):
        folder = folder.parent
    notes: list[str] = []
    samples = _samples(path, notes)
    return Recording(run=folder.name or path.stem, source="trainer_state", samples=samples, notes=notes)


def _samples(path: Path, notes: list[str]) -> Iterator[Sample]:
    if (size := path.stat().st_size) > LIMIT_BYTES:
        raise BadInput([f"{path}:1: json: {size} bytes, more than the {LIMIT_BYTES} that are read at once"])
    text = path.read_text(encoding=beginning(path, 4).encoding, errors="replace")
    try:
        state = loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput([f"{path}:{_line(error)}: json: {reason(error)}"]) from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise BadInput([f"{path}:1: log_history: missing, or not a list"])
    joined = Rows(path, notes)
    try:
        for number, entry in enumerate(history):
            if not isinstance(entry, dict) or "loss" not in entry:
                continue  # evaluation and summary entries
            where = f"{path}:1: log_history[{number}]"
            yield from joined.row(*_row(path, number, entry), where, is_empty=entry["loss"] is None)
    except BadInput:
        yield from joined.cut_off()
        raise
    names = dict.fromkeys(str(name) for entry in history[:MAX_NAMES] if isinstance(entry, dict) for name in entry)
    yield from joined.finish(list(names)[:MAX_NAMES])


def _row(path: Path, count: int, entry: dict[str, Any]) -> tuple[int, dict[str, float]]:
    step, problems = 0, []
    try:
        step = whole(entry.get("step"))
    except ValueError as error:
        problems.append(f"{path}:1: log_history[{count}].step: {error}")
    scalars: dict[str, float] = {}
    for key, name in KEYS.items():
        value = entry.get(key)
        if value is None:
            continue
        try:
            scalars[name] = number(value)
        except ValueError as error:
            problems.append(f"{path}:1: log_history[{count}].{key}: {error}")
    if problems:
        raise BadInput(problems)
    return step, scalars


def _line(error: Exception) -> int:
    return int(getattr(error, "lineno", 1))
