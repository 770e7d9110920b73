"""TensorBoard event files, read with the `tensorboard` package if it is installed: event by event, not all at once.

Writers write the scalars of a step one by one, so a step is held until enough later ones have come. A tag whose step
does not grow means that the run went back. Several files in a folder are one run, in the order of their names, which
begin with the time.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput, MissingDependency
from fp8watch.replay.readers.names import OneName, meaning
from fp8watch.replay.recording import Attempts, Recording

HELD_STEPS = 16
"""Newest steps that may still get a scalar."""


def read(path: Path) -> Recording:
    """The run in a folder of event files, or in one of them. Raises `MissingDependency`."""
    try:
        loader: Any = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    except ImportError as error:
        raise MissingDependency("tensorboard", "replay") from error
    folder = path if path.is_dir() else path.parent
    files = sorted(path.glob("*tfevents*")) if path.is_dir() else [path]
    notes: list[str] = []
    samples = _samples(path, files, loader, OneName(notes))
    return Recording(run=folder.resolve().name, source="tensorboard", samples=samples, notes=notes)


def _samples(path: Path, files: list[Path], loader: Any, one_name: OneName) -> Iterator[Sample]:
    attempts = Attempts()
    tags: set[str] = set()
    has_loss = False
    newest: dict[str, int] = {}
    held: dict[int, dict[str, float]] = {}
    places: dict[int, str] = {}
    given = -1
    for where, step, tag, value in _scalars(files, loader):
        tags.add(tag)
        key = meaning(tag)
        if key is None or key == "step" or not one_name.takes(key, tag, where):
            continue
        has_loss = has_loss or key == "loss"
        if step <= newest.get(key, -1):
            for earlier in sorted(held):
                yield attempts.sample(earlier, held[earlier], places[earlier])
            held.clear()
            places.clear()
            newest.clear()
            given = -1
        newest[key] = step
        if step <= given:
            continue  # too late, its step has been yielded
        held.setdefault(step, {})[key] = value
        places.setdefault(step, where)
        if len(held) > HELD_STEPS:
            given = min(held)
            yield attempts.sample(given, held.pop(given), places.pop(given))
    if not has_loss:
        raise BadInput([f"{path}:1: loss: no such scalar; there are: {', '.join(sorted(tags)) or 'none'}"])
    for earlier in sorted(held):
        yield attempts.sample(earlier, held[earlier], places[earlier])
    attempts.check()


def _scalars(files: list[Path], loader: Any) -> Iterator[tuple[str, int, str, float]]:
    """(`file:number of the event`, step, tag, value)."""
    for file in files:
        try:
            # The last record of a running training may be cut off; the loader ends there without an error.
            for count, event in enumerate(loader.LegacyEventFileLoader(str(file)).Load(), start=1):
                for value in event.summary.value:
                    number = _number(value)
                    if number is not None:
                        yield f"{file}:{count}", int(event.step), str(value.tag), number
        except BadInput:
            raise
        except Exception as error:  # whatever the package raises for a damaged file, protobuf errors included
            raise BadInput([f"{file}:1: events: {type(error).__name__}: {error}"]) from error


def _number(value: Any) -> float | None:
    """A scalar summary's value, of old and new writers; None for histograms, images and text."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and value.tensor.dtype in (1, 2):  # DT_FLOAT, DT_DOUBLE
        numbers = value.tensor.float_val or value.tensor.double_val
        if len(numbers) == 1:
            return float(numbers[0])
        if len(value.tensor.tensor_content) in (4, 8):
            return float(_tensor_util().make_ndarray(value.tensor).reshape(-1)[0])
    return None


def _tensor_util() -> Any:
    return importlib.import_module("tensorboard.util.tensor_util")
