"""grad_drift: the gradient norm grows slowly, with no point out of range.

Runs in block-scaled formats that blow up do so after a gradual growth of the gradient norm (arXiv 2506.20752); the
baseline of a spike rule follows that growth and never sees it. log2 of the norm before clipping is averaged over blocks
on three time scales (`fp8watch.detect.drift`). Warn when it rises steadily by `LIMIT_LOG2` within a window of 224,
1,792 or 14,336 points. Norms also grow in runs that train well, as the learning rate decays or late in training, so
growth is never more than a warning.
Source: detector default D7 (there a cumulative sum of log norms; block means also say since when and by how much).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.drift import BLOCK, SCALES, Trends

LIMIT_LOG2 = 1.0
"""Bits within a window: twice the norm."""
NAMES = ["grad_norm"]


class GradDriftState(msgspec.Struct):
    """The trend, and the latest verdict on each time scale."""

    trends: Trends = msgspec.field(default_factory=Trends)
    rises: list[float] = msgspec.field(default_factory=lambda: [0.0] * SCALES)
    """Bits per scale, 0 where there is no drift."""
    steps: list[int] = []
    values: list[float] = []
    """log2 norms of the current block; `steps` holds their steps."""


class GradDrift:
    """Slow growth of the log gradient norm."""

    name = "grad_drift"

    def start(self) -> GradDriftState:
        """The state before any sample."""
        return GradDriftState()

    def rolled_back(self, state: GradDriftState, step: int) -> GradDriftState:
        """Blocks after `step` are forgotten."""
        if state.trends.scales:
            state.trends.cut(step)
        return GradDriftState(trends=state.trends)

    def update(self, state: GradDriftState, sample: Sample) -> tuple[GradDriftState, list[Symptom]]:
        """Look at one step. Verdicts change only when a block ends."""
        norm = sample.scalars.get("grad_norm")
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return state, []
        state.steps.append(sample.step)
        state.values.append(math.log2(norm))
        if len(state.values) == BLOCK:
            self._end_block(state)
        most = max(state.rises)
        if most <= 0:
            return state, []
        i = state.rises.index(most)
        first, length = state.trends.window(i)
        return state, [
            Symptom(
                detector=self.name,
                severity="warn",
                step=sample.step,
                onset_step=first,
                evidence={
                    "rise_log2": round(most, 3),
                    "window_steps": [first, sample.step],
                    "window_points": length,
                    "grad_norm": norm,
                },
            )
        ]

    def _end_block(self, state: GradDriftState) -> None:
        state.trends.follow(NAMES)
        for i in state.trends.push_block(np.array([state.values]), state.steps[0]):
            rise = state.trends.rise(i)
            now = np.where(rise >= LIMIT_LOG2, rise, 0.0)
            if now.any() or state.rises[i]:
                now = state.trends.kept(i, np.array([state.rises[i]]), now)
            state.rises[i] = float(now[0])
        state.steps, state.values = [], []
