"""TensorBoard event files, through the `tensorboard` package where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput, MissingDependency
from fp8watch.replay.readers.csv_log import ALIASES
from fp8watch.replay.recording import Attempts, Recording


def read(path: Path) -> Recording:
    """The run in a folder of event files, or in one of them. Raises `MissingDependency`."""
    try:
        events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError as error:
        raise MissingDependency("tensorboard", "replay") from error
    accumulator = events.EventAccumulator(str(path), size_guidance={events.SCALARS: 0})
    folder = path if path.is_dir() else path.parent
    return Recording(run=folder.resolve().name, source="tensorboard", samples=_samples(path, accumulator))


def _samples(path: Path, accumulator: Any) -> Iterator[Sample]:
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    lower = {tag.lower(): tag for tag in tags}
    merged: dict[int, dict[str, float]] = {}
    order: list[int] = []
    for key, names in ALIASES.items():
        tag = next((lower[name] for name in names if name in lower), None)
        if key == "step" or tag is None:
            continue
        for event in accumulator.Scalars(tag):
            if event.step not in merged:
                merged[event.step] = {}
                order.append(event.step)
            merged[event.step][key] = float(event.value)
    if not any("loss" in scalars for scalars in merged.values()):
        raise BadInput([f"{path}:1: loss: no such scalar; there are: {', '.join(sorted(tags)) or 'none'}"])
    attempts = Attempts()
    for step in sorted(order):
        yield attempts.sample(step, merged[step])
