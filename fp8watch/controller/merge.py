"""From the frames of all ranks to one `Sample` a step: matched by module name, never by position.

Scalars: loss, update_rms and update_ratio are means over ranks (a non-finite one stays non-finite), tokens and
samples are sums, the rest is the largest. Columns: amax is the largest over the ranks that observed it, the scale
is that of the rank nearest to clipping (largest amax * scale), counts are sums.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch import columns
from fp8watch.detect.base import Sample
from fp8watch.records import Layout, StepFrame, TensorColumn

_MEANS = frozenset({"loss", "update_rms", "update_ratio", "lr_factor", "learning_rate"})
_SUMS = frozenset({"tokens", "samples"})
_COUNTS = frozenset({"quantized", "saturated", "underflowed", "nonfinite"})
WAIT_STEPS = 4
"""A step is closed without a rank that is this many steps behind the others."""

Array = npt.NDArray[Any]


class Merger:
    """Collects frames of one attempt; a step is complete when all expected ranks gave theirs."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.duplicates = 0
        """Frames whose step was already closed, or that came twice."""
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._waiting: dict[int, dict[int, StepFrame]] = {}
        self._closed = 0

    def layout(self, layout: Layout) -> None:
        """Announce a rank's order of columns."""
        self._layouts[layout.rank, layout.layout_id] = layout

    def restart(self, step: int) -> None:
        """A new attempt: frames after `step` are new again."""
        self._waiting.clear()
        self._layouts.clear()
        self._closed = step

    def frame(self, frame: StepFrame) -> list[Sample]:
        """Take a frame in; the samples that are complete now, in order of their steps."""
        if frame.step <= self._closed or frame.rank in self._waiting.get(frame.step, {}):
            self.duplicates += 1
            return []
        self._waiting.setdefault(frame.step, {})[frame.rank] = frame
        return self._complete()

    def without(self, num_ranks: int) -> list[Sample]:
        """Expect fewer ranks from now on; the samples that are complete for it."""
        self.num_ranks = max(1, num_ranks)
        return self._complete()

    def _complete(self) -> list[Sample]:
        ready = []
        for step in sorted(self._waiting):
            frames = self._waiting[step]
            is_late = max(self._waiting) - step >= WAIT_STEPS
            if len(frames) < self.num_ranks and not is_late:
                break
            del self._waiting[step]
            self._closed = step
            ready.append(merge([frames[rank] for rank in sorted(frames)], self._layouts))
        return ready


def merge(frames: list[StepFrame], layouts: dict[tuple[int, int], Layout]) -> Sample:
    """One sample from the frames of one step. A frame without a known layout adds its scalars only."""
    first = frames[0]
    extremes: dict[str, int] = {}
    scalars = _merge_scalars(frames, extremes)
    tensors, values, valid = _merge_columns(frames, layouts, extremes)
    return Sample(
        attempt=first.attempt,
        step=first.step,
        scalars=scalars,
        tensors=tensors,
        values=values,
        valid=valid,
        updates_forward=max(frame.updates_forward for frame in frames),
        updates_backward=max(frame.updates_backward for frame in frames),
        rank_of_extreme=extremes,
        num_ranks=len(frames),
    )


def _merge_scalars(frames: list[StepFrame], extremes: dict[str, int]) -> dict[str, float]:
    if len(frames) == 1:
        return dict(frames[0].scalars)
    merged: dict[str, float] = {}
    for name in {name: None for frame in frames for name in frame.scalars}:
        pairs = [(frame.scalars[name], frame.rank) for frame in frames if name in frame.scalars]
        # NaN compares with nothing: a rank that has one is the extreme.
        worst, rank = next((p for p in pairs if math.isnan(p[0])), max(pairs))
        extremes[name] = rank
        if name in _SUMS:
            merged[name] = math.fsum(value for value, _ in pairs)
        elif name in _MEANS:
            merged[name] = sum(value for value, _ in pairs) / len(pairs)
        else:
            merged[name] = worst
        if name == "loss":
            merged["loss_max"] = worst
    return merged


def _merge_columns(
    frames: list[StepFrame], layouts: dict[tuple[int, int], Layout], extremes: dict[str, int]
) -> tuple[tuple[TensorColumn, ...], dict[str, Array], dict[str, npt.NDArray[np.bool_]]]:
    known = [(frame, layouts.get((frame.rank, frame.layout_id))) for frame in frames]
    described = [(frame, layout) for frame, layout in known if layout is not None]
    if not described:
        return (), {}, {}
    if len(described) == 1:
        frame, layout = described[0]
        size = len(layout.columns)
        unpacked = {name: columns.unpack(column) for name, column in frame.columns.items()}
        fitting = {name: pair for name, pair in unpacked.items() if len(pair[0]) == size}
        return (
            tuple(layout.columns),
            {name: values for name, (values, _) in fitting.items()},
            {name: mask for name, (_, mask) in fitting.items()},
        )
    tensors: dict[str, TensorColumn] = {}
    for _, layout in described:
        for column in layout.columns:
            tensors.setdefault(column.name, column)
    index = {name: position for position, name in enumerate(tensors)}
    values: dict[str, Array] = {}
    valid: dict[str, npt.NDArray[np.bool_]] = {}
    nearest = np.full(len(index), -np.inf)
    for frame, layout in described:
        target = np.array([index[column.name] for column in layout.columns], dtype=np.int64)
        here = {name: columns.unpack(column) for name, column in frame.columns.items()}
        here = {name: pair for name, pair in here.items() if len(pair[0]) == len(target)}
        for name, (data, mask) in here.items():
            if name == "scale":
                continue
            held = values.setdefault(name, np.zeros(len(index), dtype=data.dtype))
            seen = valid.setdefault(name, np.zeros(len(index), dtype=np.bool_))
            spots, news = target[mask], data[mask]
            if name in _COUNTS:
                held[spots] += news
            else:
                pick = np.fmin if name == "snr" else np.maximum
                held[spots] = np.where(seen[spots], pick(held[spots], news), news)
            if name == "amax" and len(news) and np.max(news) >= np.max(held):
                extremes["amax"] = frame.rank
            seen[spots] = True
        if "scale" in here:
            data, mask = here["scale"]
            amax = here["amax"][0] if "amax" in here else np.ones_like(data)
            with np.errstate(all="ignore"):
                product = np.where(np.isfinite(amax * data), amax * data, np.inf)
            held = values.setdefault("scale", np.zeros(len(index), dtype=data.dtype))
            seen = valid.setdefault("scale", np.zeros(len(index), dtype=np.bool_))
            better = mask & (product > nearest[target])
            held[target[better]] = data[better]
            nearest[target[better]] = product[better]
            seen[target[mask]] = True
    return tuple(tensors.values()), values, valid
