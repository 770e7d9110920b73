"""Selects the series to export when there are too many, so that their number stays within a fixed budget.

The state of each run comes first. Ended runs use at most a fifth of the budget for it, the latest end first, so that
one large model does not hide how other runs ended. The rest of live runs follows, and then the rest of ended ones.

Series left out are counted: per run if the run has a series for the count, else together under an empty `run`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from fp8watch import __version__
from fp8watch.metrics import CATALOGUE, PREFIX
from fp8watch.wire import WIRE_VERSION
from fp8watch_agent import families
from fp8watch_agent.families import Family, Grouped
from fp8watch_agent.run_metrics import RunMetrics
from fp8watch_agent.tensor_metrics import TensorView
from fp8watch_agent.worst import WorstLayers

ENDED_SHARE = 5
"""The state of ended runs takes at most one part in this many of the budget."""
COUNTED_FOR_SECONDS = 60.0
"""How long a count of a run's series is reused while there is no room to export them."""
_DROPPED = "agent_series_dropped_total"


@dataclass(slots=True)
class _Kept:
    """What is kept about a run between expositions."""

    worst: WorstLayers
    num_dropped: int = 0
    num_over: int = 0
    """Series left out of the last exposition. Only an increase over it is counted."""
    num_head_series: int = 0
    """Without the run's state."""
    num_tensor_series: int = 0
    counted_at: float = float("-inf")

    def is_counted(self, now: float) -> bool:
        """Whether the number of its series is recent enough."""
        return now - self.counted_at < COUNTED_FOR_SECONDS


@dataclass(slots=True)
class _Page:
    """An exposition being made."""

    left: int
    """Series that still fit."""
    found: dict[str, Family] = field(
        default_factory=lambda: {metric.name: Family(metric=metric) for metric in CATALOGUE}
    )
    over: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Run -> series left out."""

    def add(self, run: str, samples: list[families.Sample], room: int | None = None) -> int:
        """Add as many samples as fit (at most `room`); returns how many."""
        taken = samples[: max(0, min(self.left, self.left if room is None else room))]
        for name, labels, value in taken:
            self.found[PREFIX + name].samples.append((labels, value))
        self.left -= len(taken)
        self.over[run] += len(samples) - len(taken)
        return len(taken)


class SeriesBudget:
    """Makes expositions. Not thread-safe."""

    def __init__(self, budget: int, worst_layers: int) -> None:
        self._budget = budget
        self._worst_layers = worst_layers
        self._kept: dict[str, _Kept] = {}
        self._num_dropped_unnamed = 0

    def build(
        self,
        heads: list[RunMetrics],
        tensors_of: Callable[[str], TensorView | None],
        about_process: list[Family],
        now: float,
    ) -> list[Family]:
        """All families in the catalogue's order. Those about the process are always exported.

        `tensors_of` is called only for runs whose tensors are exported or have to be counted.
        """
        self._kept = {head.run: self._kept.get(head.run) or _Kept(WorstLayers(self._worst_layers)) for head in heads}
        about = {family.metric.name: family for family in about_process}
        # Reserves two series: build_info, and the count under an empty `run`.
        page = _Page(left=self._budget - 2 - sum(_num_series(family) for family in about.values()))
        page.found[PREFIX + "build_info"].samples.append(((__version__, str(WIRE_VERSION)), 1.0))
        live = [head for head in heads if head.is_live or not head.run]
        ended = sorted((head for head in heads if not (head.is_live or not head.run)), key=lambda h: -h.state_since)
        named: set[str] = set()
        room_for_ended = self._budget // ENDED_SHARE
        for runs, room in ((live, page.left), (ended, min(room_for_ended, page.left))):
            for head in runs:
                if min(room, page.left) > 0 and head.run:  # room for the count of what is left out
                    named.add(head.run)
                    page.left, room = page.left - 1, room - 1
                room -= page.add(head.run, families.of_state(head), room)
        for runs in (live, ended):
            self._fill(page, runs, tensors_of, now)
        self._count(page, named)
        return [about.get(family.metric.name, family) for family in page.found.values()]

    def _fill(
        self,
        page: _Page,
        runs: list[RunMetrics],
        tensors_of: Callable[[str], TensorView | None],
        now: float,
    ) -> None:
        """Add everything but the state of runs, the most important samples of all these runs first."""
        grouped: dict[str, Grouped] = {}
        for head in runs:
            kept = self._kept[head.run]
            if page.left <= 0 and kept.is_counted(now):
                page.over[head.run] += kept.num_head_series + kept.num_tensor_series
                continue
            grouped[head.run] = found = families.of_run(head)
            kept.num_head_series = sum(map(len, found.values()))
            page.add(head.run, found.pop(families.SCALARS, []))
        for run, found in grouped.items():
            page.add(run, found.pop(families.COUNTED, []))
        for run, found in grouped.items():
            found.update(self._tensors(page, run, tensors_of, now))
        for importance in (families.BLOCKS, families.LAYERS, families.ZEROS):
            for run, found in grouped.items():
                page.add(run, found.pop(importance, []))

    def _tensors(self, page: _Page, run: str, tensors_of: Callable[[str], TensorView | None], now: float) -> Grouped:
        """Add a run's histograms and return its other tensor samples. Returns none if they are only counted."""
        kept = self._kept[run]
        if page.left <= 0 and kept.is_counted(now):
            page.over[run] += kept.num_tensor_series
            return {}
        view = tensors_of(run)
        if view is None or not view.modules:
            kept.num_tensor_series, kept.counted_at = 0, now
            return {}
        grouped = families.of_tensors(run, view, kept.worst, now)
        histograms = families.histograms(run, view)
        size = families.HISTOGRAM_SERIES
        kept.num_tensor_series = sum(map(len, grouped.values())) + size * len(histograms)
        kept.counted_at = now
        for labels, counts in histograms:
            if page.left >= size:
                page.found[PREFIX + "headroom_log2"].buckets.append((labels, counts))
                page.left -= size
            else:
                page.over[run] += size
        return grouped

    def _count(self, page: _Page, named: set[str]) -> None:
        shown = page.found[PREFIX + _DROPPED].samples
        for run, kept in self._kept.items():
            more = max(0, page.over[run] - kept.num_over)
            kept.num_over = page.over[run]
            if run in named:
                kept.num_dropped += more
                shown.append(((run,), float(kept.num_dropped)))
            else:
                self._num_dropped_unnamed += more
        if self._num_dropped_unnamed or "" in self._kept:
            shown.append((("",), float(self._num_dropped_unnamed)))

    def left_out(self, count: int) -> None:
        """Count series of runs that are not kept at all."""
        self._num_dropped_unnamed += count


def _num_series(family: Family) -> int:
    return len(family.samples) + families.HISTOGRAM_SERIES * len(family.buckets)
