"""saturation: a cast clips, because the scale is too large for the tensor's amax.

`r = amax * scale / fp8_max` of the same step is exact: r > 1 means that at least one element was clipped.
With delayed scaling an amax that grows between two updates clips a little in a healthy run (with
`most_recent` about every second step), and that is harmless: at r = 1.5 the signal-to-noise ratio is still
31.3 dB, at 2 it is 27.0 dB with 0.75 % of a normal tensor clipped, at 4 it is 11.6 dB with 18 %.
Source of these figures: E4M3 round-to-nearest on 4.2 M normal samples.
So r > 1 is a warning once it is out of the tensor's ordinary range, and to act takes clipping that stays:
r > 4 in 3 of 8 steps, or r > 2 and saturated elements beyond 5 % in 3 of 8 sampled steps. A burst of one or two steps,
as an outlier makes it, stays a warning.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Array, Rows, names_of, observed
from fp8watch.formats import FORMATS

WINDOW = 8
"""Steps looked back on."""
WARN_LOG2 = 1.0
"""Bits of clipping that are worth a warning (r > 2: 4.5 dB lost)."""
ACT_LOG2 = 2.0
"""Bits of clipping that hurt (r > 4: 20 dB lost)."""
ACT_STEPS = 3
"""Steps of the window that must clip to act."""
ACT_RATIO = 0.05
"""Share of saturated elements that hurts, whatever the amax says."""


class SaturationState(msgspec.Struct):
    """The newest clip depths, log2 r, and saturated shares."""

    depth: Rows = msgspec.field(default_factory=Rows)
    share: Rows = msgspec.field(default_factory=Rows)
    onset: dict[str, int] = {}
    """Step at which each tensor that clips now began to."""


class Saturation:
    """Exact clip flags from amax and scale, element shares where they were counted."""

    name = "saturation"

    def start(self) -> SaturationState:
        """Nothing seen."""
        return SaturationState()

    def rolled_back(self, state: SaturationState, step: int) -> SaturationState:
        """The newest steps are undone."""
        return SaturationState()

    def update(self, state: SaturationState, sample: Sample) -> tuple[SaturationState, list[Symptom]]:
        """Look at one step."""
        amax, scale = observed(sample, "amax_last") or observed(sample, "amax"), observed(sample, "scale")
        if amax is None or scale is None:
            return state, []
        names = names_of(sample)
        state.depth.follow(names, WINDOW)
        state.share.follow(names, WINDOW)
        high = sample.values.get("high_precision", np.zeros(len(names), np.uint8)).astype(np.bool_)
        top = np.array([FORMATS[column.fp8_format].max for column in sample.tensors])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            depth = np.log2(amax[0] * scale[0] / top)
        usable = amax[1] & scale[1] & ~high & np.isfinite(depth)
        state.depth.push(np.arange(len(names)), np.where(usable, depth, np.nan))
        share = self._share(sample, high)
        if share is not None:
            rows = np.flatnonzero(np.isfinite(share))
            # Clipped at less than r = 2 an element is off by no more than the format's own steps add up to.
            state.share.push(rows, np.where(depth[rows] > WARN_LOG2, share[rows], 0.0))
        deep = (state.depth.values > ACT_LOG2).sum(axis=1)
        wide = (state.share.values > ACT_RATIO).sum(axis=1)
        now = usable & (depth > WARN_LOG2)
        act = usable & (depth > 0) & ((deep >= ACT_STEPS) | (wide >= ACT_STEPS))
        state.onset = {
            name: state.onset.get(name, sample.step)
            for i, name in enumerate(names)
            if now[i] or act[i] or (name in state.onset and (state.depth.values[i] > WARN_LOG2).any())
        }
        hit = np.flatnonzero(act) if act.any() else np.flatnonzero(now)
        if not len(hit):
            return state, []
        order = sorted((int(i) for i in hit), key=lambda i: -float(depth[i]))
        return state, [self._symptom(state, sample, order, depth, share, bool(act.any()))]

    def _share(self, sample: Sample, high: Array) -> Array | None:
        saturated, quantized = observed(sample, "saturated"), observed(sample, "quantized")
        if saturated is None or quantized is None:
            return None
        usable = saturated[1] & quantized[1] & (quantized[0] > 0) & ~high
        return np.where(usable, saturated[0] / np.maximum(quantized[0], 1), np.nan)

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
            onset_step=min(state.onset.get(sample.tensors[i].name, sample.step) for i in order),
            tensors=tuple(order),
            rank=sample.rank_of_extreme.get("amax"),
            evidence=evidence,
        )
