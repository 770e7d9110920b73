"""Transformers' `trainer_state.json`: the `log_history` that Trainer keeps.

Trainer averages the loss over `logging_steps` and, by default, replaces a non-finite loss by an average of
earlier ones (`logging_nan_inf_filter`): such a series may look clean when the run was not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.replay.recording import Attempts, Recording

LIMIT_BYTES = 1 << 29
"""A history of some millions of entries; JSON cannot be read in parts."""
KEYS = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}


def read(path: Path) -> Recording:
    """The run in a trainer_state.json; named after its folder."""
    return Recording(run=path.resolve().parent.name or path.stem, source="trainer_state", samples=_samples(path))


def _samples(path: Path) -> Iterator[Sample]:
    if (size := path.stat().st_size) > LIMIT_BYTES:
        raise BadInput([f"{path}:1: json: {size} bytes, more than the {LIMIT_BYTES} that are read at once"])
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        # Python's json writes NaN and Infinity bare, which the JSON standard (and msgspec) does not know.
        state = _loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput([f"{path}:{_line(error)}: json: {error}"]) from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise BadInput([f"{path}:1: log_history: missing, or not a list"])
    attempts = Attempts()
    for number, entry in enumerate(history):
        if not isinstance(entry, dict) or "loss" not in entry:
            continue  # evaluation and summary entries
        yield _sample(path, number, entry, attempts)


def _sample(path: Path, number: int, entry: dict[str, Any], attempts: Attempts) -> Sample:
    step = entry.get("step")
    problems = []
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        problems.append(f"{path}:1: log_history[{number}].step: {step!r} is no whole number from 0")
    scalars: dict[str, float] = {}
    for key, name in KEYS.items():
        value = entry.get(key)
        if value is None:
            continue
        try:
            scalars[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            problems.append(f"{path}:1: log_history[{number}].{key}: {value!r} is not a number")
    if problems:
        raise BadInput(problems)
    return attempts.sample(int(step or 0), scalars)


def _loads(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)


def _line(error: Exception) -> int:
    return int(getattr(error, "lineno", 1))
