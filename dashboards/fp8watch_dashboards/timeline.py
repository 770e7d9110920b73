"""Reads the steps of a run that are drawn, and only those, from the store.

A long run is sampled on a grid whose stride is a power of two, so that the points stay the same while the run grows.
The steps around findings and actions and the newest steps are always read in full: a spike of one step that raised a
finding is on the chart at any zoom. `Timeline.stride` tells what was left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch.controller.merge import merge
from fp8watch.controller.stores.base import Store
from fp8watch.records import Layout, StepFrame
from fp8watch_dashboards.headroom import Floats, Mask, format_limits, sample_headroom

MAX_GRID_POINTS = 1024
"""Most grid steps that are read; a chart is about 1,200 pixels wide."""
FULL_NEWEST_STEPS = 64
FULL_AROUND_EVENT_STEPS = 4
MAX_EVENTS = 64
"""Number of events, the newest ones, around which all steps are read."""
MAX_STEP = 1 << 40
SETTLED_AFTER_STEPS = 32
"""Steps after which a step's frames count as complete (until then a slow rank's frame may still arrive)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One optimizer step of a run, merged over its ranks."""

    attempt: int
    step: int
    time_unix: float
    scalars: dict[str, float]
    """As the detectors see them, including NaN and infinity; absent: not reported."""
    headroom: Floats
    """[rows of `Timeline.tensors`] NaN where not observed."""
    in_bf16: Mask
    """[rows of `Timeline.tensors`] whether the module ran in BF16 on any rank."""

    @property
    def loss(self) -> float | None:
        """Mean over ranks; None if not reported."""
        return self.scalars.get("loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is drawn of a run."""

    points: list[StepPoint]
    """Ordered by attempt, then step."""
    tensors: list[tuple[str, str]]
    """`(block, module:tensor)` of every row, grouped by block, in model order."""
    first_step_of_attempt: dict[int, int]
    stride: int
    """1: every step was read."""
    first_step: int
    last_step: int

    def survives(self, point: StepPoint) -> bool:
        """Whether no later attempt started at or before this step, which would replace it."""
        return all(
            first > point.step for attempt, first in self.first_step_of_attempt.items() if attempt > point.attempt
        )

    def surviving(self) -> list[StepPoint]:
        """The points of the surviving timeline, by step."""
        return sorted((point for point in self.points if self.survives(point)), key=lambda point: point.step)


EMPTY = Timeline(points=[], tensors=[], first_step_of_attempt={}, stride=1, first_step=0, last_step=0)


@dataclass(slots=True)
class TimelineReader:
    """Builds timelines of one run, and keeps the settled points of the last one. Not thread-safe."""

    run: str
    _points: dict[int, list[StepPoint]] = field(default_factory=dict)
    _tensors: list[tuple[str, str]] = field(default_factory=list)
    _attempt: int = -1
    _head: int = 0
    _last_step: int = 0

    def read(self, store: Store, attempt: int, events: Iterable[int] = ()) -> Timeline:
        """The current timeline.

        `attempt` is the run's current one; `events` are the steps of findings and actions, around which all steps are
        read.
        """
        layouts = list(store.read(self.run, Layout))
        frames = _Frames(store=store, run=self.run)
        start = frames.first_step()
        if start is None:
            return EMPTY
        tensors = _rows(layouts)
        if tensors != self._tensors or attempt != self._attempt:
            self._points, self._head = {}, 0
        self._tensors, self._attempt = tensors, attempt
        last = self._last_step = _largest(frames.any_from, start=start, known=self._last_step)
        head = self._head = _largest(lambda step: frames.any_from(step, attempt), start=start, known=self._head)
        stride = 1 << max(0, math.ceil(math.log2((last - start + 1) / MAX_GRID_POINTS)))
        wanted = _wanted_steps(start, last, head, stride, events)
        points_of = _Points(tensors=tensors, layouts=layouts)
        found = {step: self._points[step] for step in wanted if step in self._points}
        for begin, end in _ranges(step for step in wanted if step not in found):
            found.update(points_of.of(store.read(self.run, StepFrame, begin, end)))
        # The current attempt may still repeat steps beyond the head: keep only points well behind it.
        self._points = {step: points for step, points in found.items() if step <= head - SETTLED_AFTER_STEPS}
        return Timeline(
            points=sorted((p for group in found.values() for p in group), key=lambda p: (p.attempt, p.step)),
            tensors=tensors,
            first_step_of_attempt=self._starts_of_attempts(store, found, stride),
            stride=stride,
            first_step=start,
            last_step=last,
        )

    def _starts_of_attempts(self, store: Store, points: dict[int, list[StepPoint]], stride: int) -> dict[int, int]:
        """The exact first step of every attempt; the grid may show it up to one stride late."""
        starts: dict[int, int] = {}
        for step in sorted(points):
            for point in points[step]:
                starts.setdefault(point.attempt, step)
        if stride == 1:
            return starts
        for attempt, seen in sorted(starts.items())[1:]:
            earlier = store.read(self.run, StepFrame, max(0, seen - stride), seen)
            starts[attempt] = min(frame.step for frame in earlier if frame.attempt == attempt)
        return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frames:
    """Looks for frames in bounded reads: an engine may sort everything that a read selects before returning a row."""

    store: Store
    run: str

    def windows_from(self, step: int) -> Iterator[Iterator[StepFrame]]:
        """The frames from `step` on, in windows of doubling width; an empty window costs next to nothing."""
        width = 16
        while step < MAX_STEP:
            yield self.store.read(self.run, StepFrame, step, step + width - 1)
            step, width = step + width, width * 2

    def first_step(self) -> int | None:
        """The smallest step in the store; None if it has no frame of the run."""
        for window in self.windows_from(0):
            steps = [frame.step for frame in window]
            if steps:
                return min(steps)
        return None

    def any_from(self, step: int, attempt: int | None = None) -> bool:
        """Whether there is a frame (of `attempt`, if given) at `step` or later."""
        return any(
            attempt is None or frame.attempt == attempt for window in self.windows_from(step) for frame in window
        )


@dataclass(slots=True)
class _Points:
    """Turns the frames of all ranks into points, by the same merge as for the detectors."""

    tensors: list[tuple[str, str]]
    layouts: list[Layout]
    _of_attempt: dict[int, dict[tuple[int, int], Layout]] = field(default_factory=dict)
    _places: dict[Any, tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]] = field(default_factory=dict)

    def of(self, frames: Iterable[StepFrame]) -> dict[int, list[StepPoint]]:
        """The points by step, those of a step in order of attempt."""
        groups: dict[tuple[int, int], list[StepFrame]] = defaultdict(list)
        for frame in frames:
            groups[(frame.step, frame.attempt)].append(frame)
        points: dict[int, list[StepPoint]] = defaultdict(list)
        for (step, _), group in sorted(groups.items()):
            points[step].append(self._point(sorted(group, key=lambda frame: frame.rank)))
        return points

    def _point(self, frames: list[StepFrame]) -> StepPoint:
        attempt = frames[0].attempt
        sample = merge(frames, self._known(attempt))
        key = (attempt, *((frame.rank, frame.layout_id) for frame in frames))
        if key not in self._places:
            row_of = {name: row for row, (_, name) in enumerate(self.tensors)}
            rows = np.array([row_of[tensor.name] for tensor in sample.tensors], dtype=np.intp)
            self._places[key] = (rows, format_limits(sample.tensors))
        rows, limits = self._places[key]
        headroom = np.full(len(self.tensors), np.nan, dtype=np.float32)
        in_bf16 = np.zeros(len(self.tensors), dtype=np.bool_)
        headroom[rows], in_bf16[rows] = sample_headroom(sample, limits)
        return StepPoint(
            attempt=attempt,
            step=sample.step,
            time_unix=max(frame.time_unix for frame in frames),
            scalars=sample.scalars,
            headroom=headroom,
            in_bf16=in_bf16,
        )

    def _known(self, attempt: int) -> dict[tuple[int, int], Layout]:
        """The layouts in force in an attempt: its own, else those of earlier attempts."""
        if attempt not in self._of_attempt:
            layouts = sorted((x for x in self.layouts if x.attempt <= attempt), key=lambda x: x.attempt)
            self._of_attempt[attempt] = {(layout.rank, layout.layout_id): layout for layout in layouts}
        return self._of_attempt[attempt]


def _rows(layouts: list[Layout]) -> list[tuple[str, str]]:
    """Every tensor that any rank announced, grouped by block; blocks in the order in which they first appear."""
    blocks: dict[str, dict[str, None]] = {}
    for layout in layouts:
        for column in layout.columns:
            blocks.setdefault(column.block, {})[column.name] = None
    return [(block, name) for block, names in blocks.items() for name in names]


def _largest(exists: Callable[[int], bool], *, start: int, known: int) -> int:
    """The largest step for which `exists` holds, by doubling and bisection from the last known one. `exists` must be
    true up to some step and false beyond.

    Returns `start - 1` if it holds nowhere. Takes about 2 log2(n) calls the first time, two if nothing is new.
    """
    low, span = max(start - 1, known), 1
    if known > start - 1 and not exists(known):
        low = start - 1
    while exists(low + span):
        low, span = low + span, span * 2
    high = low + span
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return low


def _wanted_steps(start: int, last: int, head: int, stride: int, events: Iterable[int]) -> list[int]:
    if stride == 1:
        return list(range(start, last + 1))
    wanted = {start, last}
    wanted.update(range(-(-start // stride) * stride, last + 1, stride))
    for newest in (head, last):
        wanted.update(range(max(start, newest - FULL_NEWEST_STEPS + 1), newest + 1))
    for event in sorted(set(events))[-MAX_EVENTS:]:
        wanted.update(
            range(max(start, event - FULL_AROUND_EVENT_STEPS), min(last, event + FULL_AROUND_EVENT_STEPS) + 1)
        )
    return sorted(wanted)


def _ranges(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Ranges of consecutive steps, so that each range is one read."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return ranges
