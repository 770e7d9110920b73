"""saturation: a cast clips, because the scale is too large for the tensor's amax.

`r = amax * scale / fp8_max` of the same step is exact: r > 1 means that at least one element was clipped. Under delayed
scaling an amax that grows between two updates clips a little in a healthy run (with `most_recent` in about every second
step), and that is harmless: at r = 1.5 the signal-to-noise ratio is still 31.3 dB, at 2 it is 27.0 dB with 0.75 % of a
normal tensor clipped, at 4 it is 11.6 dB with 18 % (E4M3 round-to-nearest on 4.2 M normal samples).
So r is a warning only above 2, and acting needs clipping that lasts: r > 4 in 3 of 8 steps, or r > 2 and more than 5 %
saturated elements in 3 of 8 sampled steps. A burst of one or two steps, such as an outlier makes, stays a warning.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Array, Rows, carried, high_precision, moved, observed, share_of, table_of

WINDOW = 8
"""Length of the window in steps."""
WARN_LOG2 = 1.0
"""Bits of clipping to warn of (r > 2: 4.5 dB lost)."""
ACT_LOG2 = 2.0
"""Bits of clipping to act on (r > 4: 20 dB lost)."""
ACT_STEPS = 3
"""Steps of the window that must clip before it acts."""
ACT_RATIO = 0.05
"""Share of saturated elements that does harm, whatever the amax says."""


class SaturationState(msgspec.Struct):
    """log2 r and saturated shares of the newest steps."""

    depth: Rows = msgspec.field(default_factory=Rows)
    share: Rows = msgspec.field(default_factory=Rows)
    onset: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_tensors] step at which each tensor that clips now began to clip, -1 for the others."""


class Saturation:
    """Exact clip flags from amax and scale, element shares where they were counted."""

    name = "saturation"
    of_tensors = True

    def start(self) -> SaturationState:
        """The state before any sample."""
        return SaturationState()

    def rolled_back(self, state: SaturationState, step: int) -> SaturationState:
        """The newest steps are undone."""
        return SaturationState()

    def update(self, state: SaturationState, sample: Sample) -> tuple[SaturationState, list[Symptom]]:
        """Look at one step."""
        amax, scale = observed(sample, "amax_last") or observed(sample, "amax"), observed(sample, "scale")
        if amax is None or scale is None:
            return state, []
        table = table_of(sample)
        order = moved(table.names, state.depth.names)
        if order is not None:
            state.onset = carried(state.onset, order, -1)
        state.depth.follow(table.names, WINDOW)
        state.share.follow(table.names, WINDOW)
        high = high_precision(sample)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            depth = np.log2(amax[0] * scale[0] / table.top)
        usable = amax[1] & scale[1] & ~high & np.isfinite(depth)
        state.depth.push(np.where(usable, depth, np.nan))
        share = self._share(sample, high)
        if share is not None:
            # Clipped at less than r = 2, an element is off by no more than the sum of the format's own steps.
            state.share.push(np.where(depth > WARN_LOG2, share, 0.0), np.isfinite(share))
        deep = (state.depth.values > ACT_LOG2).sum(axis=1)
        wide = (state.share.values > ACT_RATIO).sum(axis=1)
        now = usable & (depth > WARN_LOG2)
        act = usable & (depth > 0) & ((deep >= ACT_STEPS) | (wide >= ACT_STEPS))
        lasts = now | act | ((state.onset >= 0) & (state.depth.values > WARN_LOG2).any(axis=1))
        state.onset = np.where(lasts, np.where(state.onset >= 0, state.onset, sample.step), -1)
        hit = np.flatnonzero(act) if act.any() else np.flatnonzero(now)
        if not len(hit):
            return state, []
        worst_first = [int(i) for i in hit[np.argsort(-depth[hit], kind="stable")]]
        return state, [self._symptom(state, sample, worst_first, depth, share, bool(act.any()))]

    def _share(self, sample: Sample, high: Array) -> Array | None:
        counted = share_of(sample, "saturated", high)
        return None if counted is None else np.where(counted[1], counted[0], np.nan)

    def _symptom(
        self, state: SaturationState, sample: Sample, order: list[int], depth: Array, share: Array | None, is_act: bool
    ) -> Symptom:
        worst = order[0]
        evidence: dict[str, Any] = {
            "clip_ratio": round(float(2.0 ** depth[worst]), 3),
            "clipped_steps": int((state.depth.values[worst] > 0).sum()),
            "window": WINDOW,
            "num_tensors": len(order),
        }
        if share is not None and np.isfinite(share[worst]):
            evidence["saturated_ratio"] = float(share[worst])
        return Symptom(
            detector=self.name,
            severity="act" if is_act else "warn",
            step=sample.step,
            onset_step=min(int(state.onset[i]) for i in order),
            tensors=tuple(order),
            rank=sample.rank_of_extreme.get("amax"),
            evidence=evidence,
        )
