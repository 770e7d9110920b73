"""The tensor metrics of one run: arrays with one row per tensor, with ranks merged by module name.

Gauges take the extreme over ranks (largest amax and scale, smallest head-room) and keep the last finite value. Counters
are summed over ranks. Only clipped steps count a step once, however many ranks clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch import columns
from fp8watch.errors import WireError
from fp8watch.formats import FORMATS
from fp8watch.metrics import HEADROOM_BUCKETS
from fp8watch.records import Layout, StepFrame
from fp8watch_agent.window import SlidingExtreme

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

CLASSES = ("input", "weight", "output", "grad_output", "grad_input")
SAMPLED_COUNTS = ("quantized", "saturated", "underflowed", "blocks", "clipped_blocks")
SAMPLED_GAUGES = ("shadow_error", "scale_spread")
MAX_TENSORS = 100_000
"""Maximum number of rows of a run. A layout beyond it is refused."""
_RECENT_STEPS = 64
"""Steps whose clipped tensors are remembered: how many steps apart ranks may be."""


@dataclass(slots=True)
class _RankView:
    """Latest values of one rank, one element per row; NaN: not observed."""

    layout_id: int
    rows: Rows
    gauges: dict[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorView:
    """A copy of a run's tensor metrics. Arrays have one element per row."""

    modules: list[str]
    blocks: list[str]
    tensors: list[str]
    gauges: dict[str, Floats]
    """NaN where not observed."""
    counts: dict[str, Counts]
    clipped_steps: Counts
    histogram: Counts
    """[num_classes, num_buckets], not cumulative."""


class TensorMetrics:
    """The tensor metrics of a run. Rows are never removed."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.blocks: list[str] = []
        self.tensors: list[str] = []
        self._row_of: dict[tuple[str, str], int] = {}
        self._fp8_max: npt.NDArray[np.float64] = np.empty(0)
        self._ranks: dict[int, _RankView] = {}
        self.counts: dict[str, Counts] = {}
        self.clipped_steps: Counts = np.empty(0, dtype=np.uint64)
        self._clipped_in: dict[tuple[int, int], Mask] = {}
        self._amax_max = SlidingExtreme(is_maximum=True)
        self._headroom_min = SlidingExtreme(is_maximum=False)
        self.histogram: Counts = np.zeros((len(CLASSES), len(HEADROOM_BUCKETS) + 1), dtype=np.uint64)
        self._class_of: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)

    def layout(self, layout: Layout) -> None:
        """Set a rank's columns. Raises `WireError` above `MAX_TENSORS`."""
        if len(self._row_of) + self.num_new(layout) > MAX_TENSORS:
            raise WireError(f"layout of {len(layout.columns)} tensors, limit {MAX_TENSORS} a run")
        for column in layout.columns:
            key = (column.module, column.tensor)
            if key not in self._row_of:
                self._row_of[key] = len(self.modules)
                self.modules.append(column.module)
                self.blocks.append(column.block)
                self.tensors.append(column.tensor)
        self._grow()
        rows = np.array([self._row_of[c.module, c.tensor] for c in layout.columns], dtype=np.intp)
        for row, column in zip(rows, layout.columns, strict=True):
            self._fp8_max[row] = FORMATS[column.fp8_format].max if column.fp8_format in FORMATS else np.nan
        before = self._ranks.get(layout.rank)
        view = _RankView(layout_id=layout.layout_id, rows=rows)
        if before is not None:
            for name, values in before.gauges.items():
                view.gauges[name] = np.full(len(self.modules), np.nan, dtype=np.float32)
                view.gauges[name][rows] = self._sized(values)[rows]
        self._ranks[layout.rank] = view

    def num_new(self, layout: Layout) -> int:
        """Number of rows that a layout would add."""
        return len({(c.module, c.tensor) for c in layout.columns} - self._row_of.keys())

    def view(self, now: float) -> TensorView:
        """A copy of everything exported. Later frames do not change it."""
        gauges = {name: self.gauge(name) for name in ("amax", "scale", "headroom", *SAMPLED_GAUGES)}
        gauges |= {"amax_max_60s": self.amax_max_60s(now), "headroom_min_60s": self.headroom_min_60s(now)}
        return TensorView(
            modules=self.modules.copy(),
            blocks=self.blocks.copy(),
            tensors=self.tensors.copy(),
            gauges=gauges,
            counts={name: values.copy() for name, values in self.counts.items()},
            clipped_steps=self.clipped_steps.copy(),
            histogram=self.histogram.copy(),
        )

    def forget_rank(self, rank: int) -> None:
        """Remove the last values of a rank that is gone."""
        self._ranks.pop(rank, None)

    def observe(self, frame: StepFrame, now: float) -> dict[str, int]:
        """Apply a frame's columns. Returns the number of non-finite amax, scale and tensor elements.

        Ignores a frame whose layout has not been announced. Raises `WireError` when a column does not fit the layout.
        """
        view = self._ranks.get(frame.rank)
        if view is None or view.layout_id != frame.layout_id or not frame.columns:
            return {}
        amax, amax_ok = _read(frame, "amax", len(view.rows))
        scale, scale_ok = _read(frame, "scale", len(view.rows))
        high, high_ok = _read(frame, "high_precision", len(view.rows))
        in_bf16: Mask = high_ok & (high == 1)
        nonfinite = {
            "amax": int((amax_ok & ~np.isfinite(amax)).sum()),
            "scale": int((scale_ok & ~np.isfinite(scale)).sum()),
        }
        amax_ok &= np.isfinite(amax)
        scale_ok &= np.isfinite(scale)
        self._keep(view, "amax", amax, amax_ok)
        self._amax_max.update(now, view.rows[amax_ok], amax[amax_ok])
        self._keep(view, "scale", scale, scale_ok & ~in_bf16)
        self._observe_headroom(view, frame, amax, scale, amax_ok & scale_ok & ~in_bf16, now)
        for name in ("scale", "headroom"):
            if name in view.gauges:
                view.gauges[name][view.rows[in_bf16]] = np.nan  # runs in BF16: no scale in use
        for name in SAMPLED_COUNTS:
            values, ok = _read(frame, name, len(view.rows))
            if name in frame.columns:
                self.counts.setdefault(name, np.zeros(len(self.modules), dtype=np.uint64))[view.rows[ok]] += values[ok]
        for name in SAMPLED_GAUGES:
            if name in frame.columns:
                self._keep(view, name, *_read(frame, name, len(view.rows)))
        if "nonfinite" in frame.columns:
            values, ok = _read(frame, "nonfinite", len(view.rows))
            nonfinite["tensor"] = int(values[ok].sum())
        return nonfinite

    def gauge(self, name: str) -> Floats:
        """`amax`, `scale`, `headroom` or one of `SAMPLED_GAUGES` per row, merged over ranks; NaN where not observed."""
        pick: Callable[..., Floats] = np.fmin if name == "headroom" else np.fmax
        merged = np.full(len(self.modules), np.nan, dtype=np.float32)
        for view in self._ranks.values():
            if name in view.gauges:
                merged = pick(merged, self._sized(view.gauges[name]))
        return merged

    def amax_max_60s(self, now: float) -> Floats:
        """Largest amax per row in the window; NaN where not observed."""
        return self._amax_max.read(now)

    def headroom_min_60s(self, now: float) -> Floats:
        """Smallest head-room per row in the window; NaN where not observed."""
        return self._headroom_min.read(now)

    def _observe_headroom(
        self, view: _RankView, frame: StepFrame, amax: Floats, scale: Floats, ok: Mask, now: float
    ) -> None:
        fp8_max = self._fp8_max[view.rows]
        # Exact: the product of two float32 fits into a float64.
        used = amax.astype(np.float64) * scale.astype(np.float64)
        ok = ok & (used > 0) & np.isfinite(fp8_max)
        rows = view.rows[ok]
        headroom = np.log2(fp8_max[ok] / used[ok]).astype(np.float32)
        kept = np.zeros(len(amax), dtype=np.float32)
        kept[ok] = headroom
        self._keep(view, "headroom", kept, ok)
        self._headroom_min.update(now, rows, headroom)
        buckets = np.searchsorted(np.asarray(HEADROOM_BUCKETS), headroom, side="left")
        np.add.at(self.histogram, (self._class_of[rows], buckets), np.uint64(1))
        self._count_clipped(frame, rows[used[ok] > fp8_max[ok]])

    def _count_clipped(self, frame: StepFrame, rows: Rows) -> None:
        key = (frame.attempt, frame.step)
        seen = self._clipped_in.get(key)
        if seen is None or len(seen) < len(self.modules):
            fresh = np.zeros(len(self.modules), dtype=np.bool_)
            if seen is not None:
                fresh[: len(seen)] = seen
            self._clipped_in[key] = seen = fresh
            while len(self._clipped_in) > _RECENT_STEPS:
                del self._clipped_in[next(iter(self._clipped_in))]
        new = rows[~seen[rows]]
        seen[new] = True
        self.clipped_steps[new] += np.uint64(1)

    def _keep(self, view: _RankView, name: str, values: npt.NDArray[Any], ok: Mask) -> None:
        held = view.gauges.get(name)
        if held is None or len(held) < len(self.modules):
            held = np.full(len(self.modules), np.nan, np.float32) if held is None else self._sized(held)
            view.gauges[name] = held
        held[view.rows[ok]] = values[ok]

    def _grow(self) -> None:
        size = len(self.modules)
        missing = size - len(self._fp8_max)
        if missing:
            self._fp8_max = np.pad(self._fp8_max, (0, missing), constant_values=np.nan)
            self.clipped_steps = np.pad(self.clipped_steps, (0, missing))
            self.counts = {name: np.pad(values, (0, missing)) for name, values in self.counts.items()}
            self._class_of = np.array([CLASSES.index(tensor) for tensor in self.tensors], dtype=np.intp)
            self._amax_max.grow(size)
            self._headroom_min.grow(size)

    def _sized(self, values: Floats) -> Floats:
        missing = len(self.modules) - len(values)
        return np.pad(values, (0, missing), constant_values=np.nan) if missing else values


def _read(frame: StepFrame, name: str, length: int) -> tuple[npt.NDArray[Any], Mask]:
    column = frame.columns.get(name)
    if column is None:
        return np.zeros(length, dtype=np.float32), np.zeros(length, dtype=np.bool_)
    values, valid = columns.unpack(column)
    if len(values) != length:
        raise WireError(f"column {name} has {len(values)} values, its layout {length}")
    return values, valid
