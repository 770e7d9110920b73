"""Merges the frames of one run's local ranks into one `NodeFrame` per step, in order of steps.

A step is complete when every local rank has sent its frame. After `LATE_STEPS` steps or `LATE_SECONDS` it is sent
without the missing ranks; their frames follow in a `NodeFrame` each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from fp8watch.controller.cluster.node_frames import NodeLayout, reduce
from fp8watch.errors import WireError
from fp8watch.records import Layout, NodeFrame, StepFrame

logger = logging.getLogger(__name__)
LATE_STEPS = 4
"""Same as in `fp8watch.controller.merge`."""
LATE_SECONDS = 1.0
BELATED_STEPS = 256
"""Frames further behind than this are dropped. A rank queues no more (`Settings.queue_frames`)."""
_Step = tuple[int, int]


class NodeReducer:
    """Merges the frames of one run on one node. `clock` is monotonic, in seconds."""

    def __init__(self, run: str, node: str, clock: Callable[[], float]) -> None:
        self._run = run
        self._node = node
        self._clock = clock
        self._layout = NodeLayout()
        self._layout_id = 0
        self._announced: dict[int, Layout] = {}
        self._attempt = 0
        self._waiting: dict[_Step, dict[int, StepFrame]] = {}
        self._since: dict[_Step, float] = {}
        self._closed: _Step = (-1, -1)
        self.ranks: set[int] = set()
        """Local ranks that are connected."""
        self.lost: Counter[str] = Counter()
        """Frames that are in no `NodeFrame`, by reason: late, malformed."""

    def layout(self, layout: Layout) -> Layout | None:
        """Add a rank's layout. Returns the node's layout if this changed it or is the first."""
        if layout.attempt > self._attempt:
            self._attempt = layout.attempt
            self._announced.clear()
        self._announced[layout.rank] = layout
        is_changed = self._layout.add(layout.rank, layout.layout_id, layout.columns)
        if is_changed:
            self._layout_id += 1
        return self.announcement() if is_changed or len(self._announced) == 1 else None

    def announcement(self) -> Layout | None:
        """The node's layout; None before the first rank's."""
        if not self._announced:
            return None
        names = {column.module for column in self._layout.columns.values()}
        missing = max(max(0, a.expected_modules - a.observed_modules) for a in self._announced.values())
        reasons = dict.fromkeys(reason for a in self._announced.values() for reason in a.not_observable)
        return Layout(
            run=self._run,
            attempt=self._attempt,
            rank=self.lead,
            layout_id=self._layout_id,
            columns=list(self._layout.columns.values()),
            expected_modules=len(names) + missing,
            observed_modules=len(names),
            not_observable=list(reasons),
        )

    @property
    def lead(self) -> int:
        """The rank that represents the node: the lowest."""
        return min(self.ranks or self._announced or {0})

    def frame(self, frame: StepFrame) -> list[NodeFrame]:
        """Add a rank's frame. Returns the steps that are complete now."""
        key = (frame.attempt, frame.step)
        if key <= self._closed:
            return self._belated(frame)
        self._waiting.setdefault(key, {})[frame.rank] = frame
        self._since.setdefault(key, self._clock())
        return self._complete()

    def _belated(self, frame: StepFrame) -> list[NodeFrame]:
        """A frame of a step that was sent without it gets a `NodeFrame` of its own, unless it is far too late."""
        if frame.attempt < self._closed[0] or self._closed[1] - frame.step > BELATED_STEPS:
            self.lost["late"] += 1
            return []
        return self._reduce([frame])

    def left(self, rank: int) -> list[NodeFrame]:
        """A rank is gone. Returns the steps that are complete without it."""
        self.ranks.discard(rank)
        return self._complete()

    def tick(self) -> list[NodeFrame]:
        """Returns the steps that have waited long enough."""
        return self._complete()

    def _complete(self) -> list[NodeFrame]:
        ready: list[NodeFrame] = []
        now = self._clock()
        for key in sorted(self._waiting):
            frames = self._waiting[key]
            newest = max(step for attempt, step in self._waiting if attempt == key[0])
            is_stale = any(attempt > key[0] for attempt, _ in self._waiting)
            is_late = newest - key[1] >= LATE_STEPS or now - self._since[key] >= LATE_SECONDS
            if not self.ranks <= frames.keys() and not is_late and not is_stale:
                break
            del self._waiting[key], self._since[key]
            self._closed = key
            ready += self._reduce([frames[rank] for rank in sorted(frames)])
        return ready

    def _reduce(self, frames: list[StepFrame]) -> list[NodeFrame]:
        try:
            return [reduce(frames, self._layout, node=self._node, layout_id=self._layout_id, lead=self.lead)]
        except WireError as error:
            logger.debug("frames of step %d of run %s cannot be reduced: %s", frames[0].step, self._run, error)
            self.lost["malformed"] += len(frames)
            return []
