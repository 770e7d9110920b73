"""scale_frozen: the scale in use is not the one that the amax history demands.

Delayed scaling sets `scale = fp8_max / 2^margin / amax`, with amax the largest (`max`) or the newest (`most_recent`)
entry of a window of `history_len` updates; an update whose amax is 0 does not count. The scale that step t uses must
follow from the window through t-1, which we keep ourselves. A constant scale alone means nothing, because a long `max`
window keeps it unchanged for hundreds of healthy steps; a scale that the window does not demand is a fault.

Only what is certain is reported:
- a scale LARGER than the known part of the window allows is a fault, whatever else the window holds;
- a SMALLER one is a fault when the whole window is known, or beyond `IMPLAUSIBLE_LOG2` (no amax of a run's own past is
  that much larger, and the format has no room left);
- with several micro-batches per step the window is known only by bounds, and so is the scale;
- an infinite entry freezes a `max` scale until it leaves (fmaxf takes it, and the update is skipped); a NaN is ignored
  by some kernels and freezes others, so there only the scale itself decides.
Source: transformer-engine's delayed_scaling.cu and _update_amax_history; thresholds: detector default D1 with the
correction "frozen is not constant".
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.amax_window import AmaxWindows, Array
from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Table, carried, high_precision, moved, table_of
from fp8watch.formats import FORMATS

TOLERANCE = 0.01
"""Relative deviation that rounding and a float32 division cannot explain (they cause 1e-6)."""
PERSISTENCE = 2
"""Updates in a row with a non-zero amax in which the scale must deviate."""
IMPLAUSIBLE_LOG2 = 16.0
"""Powers of two below the known window's demand that no unseen older entry can explain."""
PURGE_TOLERANCE = 1e-3
"""How closely a changed scale must match the demand of a shorter window to count as a purge."""


class ScaleFrozenState(msgspec.Struct):
    """Amax windows and, for each tensor in the order of `windows.names`, how long its scale has deviated."""

    windows: AmaxWindows = msgspec.field(default_factory=AmaxWindows)
    deviating: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    onset: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    last_scale: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    unchanged: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Steps for which the scale has been bit-identical."""
    was_high_precision: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    lengths: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    last_step: int | None = None
    """The newest step in the windows."""


class ScaleFrozen:
    """Compares every scale with what our own amax window demands."""

    name = "scale_frozen"
    of_tensors = True

    def start(self) -> ScaleFrozenState:
        """The state before any sample."""
        return ScaleFrozenState()

    def rolled_back(self, state: ScaleFrozenState, step: int) -> ScaleFrozenState:
        """Windows as they were after `step`; deviations are counted again from 0."""
        state.windows.cut(step)
        # Steps just before `step` may be missing too; the next step then finds a gap.
        state.last_step = None if state.last_step is None else min(state.last_step, step)
        state.deviating[:] = 0
        state.unchanged[:] = 0
        return state

    def update(self, state: ScaleFrozenState, sample: Sample) -> tuple[ScaleFrozenState, list[Symptom]]:
        """Judge the step's scales by the window through the previous step, then add the step's amax."""
        if "amax" not in sample.values or "scale" not in sample.values:
            return state, []
        table = table_of(sample)
        if not table.delayed.any():
            return state, []
        self._follow_layout(state, sample, table)
        self._mind_the_gap(state, sample)
        amax, scale = sample.values["amax"], sample.values["scale"]
        seen = _valid(sample, "amax") & _valid(sample, "scale")
        high = high_precision(sample)
        returning = state.was_high_precision & ~high
        if high.any() or returning.any():
            # In high precision no cast feeds the window; on return the scale comes from a shadow amax.
            state.windows.forget(np.flatnonzero(high | returning))
        state.was_high_precision = high
        judged = seen & table.delayed & ~high & ~returning & np.isfinite(scale) & (scale > 0)
        low, high_bound = self._demand(state, sample, table)
        with np.errstate(divide="ignore", invalid="ignore"):
            deviation = np.where(scale > high_bound, np.log2(scale / high_bound), 0.0)
            deviation = np.where(scale < low, np.log2(scale / low), deviation)
        changed = scale != state.last_scale
        limit = np.log2(1 + TOLERANCE)
        off = judged & (np.abs(deviation) > limit)
        for row in np.flatnonzero(off & changed & (deviation > 0)):
            if self._is_purge(state, sample, int(row), float(scale[row])):
                off[row] = False
        poisoned = judged & table.is_max & (state.windows.infinite > 0) & (state.lengths > 1) & ~changed
        moving = seen & (amax != 0)
        state.onset = np.where((off | poisoned) & (state.deviating == 0), sample.step, state.onset)
        state.deviating = np.where(off | poisoned, state.deviating + moving, 0)
        state.unchanged = np.where(changed, 0, state.unchanged + 1)
        state.last_scale = np.where(seen, scale, state.last_scale).astype(np.float32)
        self._enter(state, sample, seen & table.delayed & ~high)
        return state, self._report(state, sample, deviation, poisoned, (low, high_bound))

    def _mind_the_gap(self, state: ScaleFrozenState, sample: Sample) -> None:
        """Steps that we did not see have entered the library's window but not ours, so ours starts again."""
        if state.last_step is not None and sample.step > state.last_step + 1:
            state.windows.forget(np.arange(len(state.windows.names)))
            state.deviating[:] = 0
        state.last_step = sample.step

    def _follow_layout(self, state: ScaleFrozenState, sample: Sample, table: Table) -> None:
        order = moved(table.names, state.windows.names)
        if order is None and np.array_equal(table.lengths, state.lengths):
            state.windows.names = table.names
            return
        rows = np.arange(len(table.names)) if order is None else order
        state.windows.remap(table.names, table.lengths, from_start=sample.step == 1 and sample.attempt == 0)
        state.deviating, state.onset = carried(state.deviating, rows, 0), carried(state.onset, rows, 0)
        state.last_scale, state.unchanged = carried(state.last_scale, rows, np.nan), carried(state.unchanged, rows, 0)
        state.was_high_precision = carried(state.was_high_precision, rows, False)
        state.lengths = table.lengths

    def _demand(self, state: ScaleFrozenState, sample: Sample, table: Table) -> tuple[Array, Array]:
        """[num_tensors] smallest and largest scale that this step may use; 0 and inf where unknown."""
        windows, top, is_max = state.windows, table.top_with_margin, table.is_max
        latest = windows.latest().astype(np.float64)
        largest = np.where(is_max, windows.peak.astype(np.float64), np.where(np.isfinite(latest), latest, 0.0))
        complete = np.where(is_max, windows.is_complete(), windows.count > 0)
        # most_recent keeps the old scale when the newest amax is not finite; a NaN in a window may do either.
        known = (windows.count > 0) & (largest > 0) & np.where(is_max, windows.infinite == 0, np.isfinite(latest))
        upper_amax, lower_amax = largest, largest
        if sample.updates_backward > 1 or sample.updates_forward > 1:
            updates = np.where(table.is_grad, sample.updates_backward, sample.updates_forward)
            several = updates > 1
            # The step's earlier micro-batches are in the window too; each has at most the step's amax.
            current = np.where(np.isfinite(sample.values["amax"]), sample.values["amax"], np.inf)
            upper_amax = np.where(several, np.maximum(upper_amax, current), upper_amax)
            # A window too short to reach back through all micro-batches may hold any part of the step.
            reaches = state.lengths >= 2 * updates
            lower_amax = np.where(several & (~is_max | ~reaches), 0.0, lower_amax)
            lower_amax = np.where(several & is_max & reaches, np.where(np.isfinite(latest), latest, 0.0), lower_amax)
        with np.errstate(divide="ignore"):
            largest_scale = np.where(known & (lower_amax > 0), top / lower_amax, np.inf)
            smallest_scale = np.where(known & (upper_amax > 0), top / upper_amax, 0.0)
        # The quotient may overflow float32; the library clamps it to the largest float.
        largest_scale = np.where(largest_scale > np.finfo(np.float32).max, np.inf, largest_scale)
        smallest_scale = np.minimum(smallest_scale, np.finfo(np.float32).max)
        return np.where(complete, smallest_scale, smallest_scale * 2.0**-IMPLAUSIBLE_LOG2), largest_scale

    def _is_purge(self, state: ScaleFrozenState, sample: Sample, row: int, scale: float) -> bool:
        """Whether a scale has just changed to what a shorter window demands: somebody purged the window, so follow."""
        column = sample.tensors[row]
        values, _ = state.windows.newest(row)
        wanted = FORMATS[column.fp8_format].max * 2.0**-column.margin / scale
        suffix = np.maximum.accumulate(np.where(np.isfinite(values), values, 0.0)[::-1])
        fits = np.flatnonzero(np.abs(suffix / wanted - 1.0) < PURGE_TOLERANCE)
        if not len(fits):
            return False
        state.windows.shorten(row, int(fits[-1]) + 1)
        return True

    def _enter(self, state: ScaleFrozenState, sample: Sample, mask: Array) -> None:
        amax = sample.values["amax"]
        rows = np.flatnonzero(mask & (amax != 0))
        if len(rows):
            state.windows.push(rows, amax[rows], sample.step)

    def _report(
        self, state: ScaleFrozenState, sample: Sample, deviation: Array, poisoned: Array, demand: tuple[Array, Array]
    ) -> list[Symptom]:
        hit = np.flatnonzero(state.deviating >= PERSISTENCE)
        if not len(hit):
            return []
        order = sorted((int(i) for i in hit), key=lambda i: -abs(float(deviation[i])))
        worst = order[0]
        scale, amax = float(sample.values["scale"][worst]), float(sample.values["amax"][worst])
        expected = demand[1][worst] if deviation[worst] > 0 else demand[0][worst]
        evidence: dict[str, Any] = {
            "scale": scale,
            "amax": amax,
            "demanded_scale": float(expected) if np.isfinite(expected) else None,
            "deviation_log2": round(float(deviation[worst]), 3),
            "num_tensors": len(order),
            "directions": sorted(
                {"backward" if sample.tensors[i].tensor.startswith("grad") else "forward" for i in order}
            ),
            "unchanged_steps": int(state.unchanged[worst]),
            "poisoned": [sample.tensors[i].name for i in order if poisoned[i]][:8],
        }
        ratio = 2.0 ** float(deviation[worst])
        for fmt in FORMATS.values():
            own = FORMATS[sample.tensors[worst].fp8_format]
            if fmt is not own and abs(ratio * own.max / fmt.max - 1) < 0.02:
                evidence["format_mismatch"] = fmt.name
        return [
            Symptom(
                detector=self.name,
                severity="act",
                step=sample.step,
                onset_step=int(state.onset[hit].min()),
                tensors=tuple(order),
                rank=sample.rank_of_extreme.get("scale"),
                evidence=evidence,
            )
        ]


def _valid(sample: Sample, name: str) -> Array:
    valid = sample.valid.get(name)
    return np.ones(len(sample.tensors), dtype=np.bool_) if valid is None else valid
