"""reference_gap: the loss compared with a reference run on the same data, in higher precision for example.

The ordinary gap depends on the phase: same-seed pairs are 0.09 apart after a thousand steps and end within 0.01. So the
tolerance is a schedule over steps (`tolerance`), and growth counts as well as size. Warn where the median gap of the
newest `BLOCK` points exceeds the tolerance, or where the gap, however small, grows steadily by `GROWTH` within a window
of one of three time scales (`fp8watch.detect.drift`). Only steps with a reference are checked; nothing is interpolated,
and nothing is reported beyond the reference's end. Never an act symptom: a person has to say which run is better.
Source: two public comparisons of FP8 with BF16, marin issue 7298 (flat, and within 0.01 at the end) and Megatron-LM
issue 1152 (0.09 at step 1,000, and shrinking).
"""

from __future__ import annotations

import math
import statistics

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.drift import SCALES, Trends

BLOCK = 16
"""Points whose median is compared with the tolerance."""
EARLY, EARLY_STEP, FINAL = 0.1, 1000, 0.01
"""Tolerance (in the unit of the loss) up to a step, and at the end; in between it falls as 1 / step."""
GROWTH = 0.002
"""Growth within a window (in the unit of the loss) that is reported, however small the gap is."""
NAMES = ["gap"]


def tolerance(step: int) -> float:
    """The ordinary gap at a step."""
    return max(FINAL, EARLY * min(1.0, EARLY_STEP / max(step, 1)))


class ReferenceGapState(msgspec.Struct):
    """The newest points that have a reference, and the trend of their gap."""

    steps: list[int] = []
    gaps: list[float] = []
    trends: Trends = msgspec.field(default_factory=Trends)
    growth: list[float] = msgspec.field(default_factory=lambda: [0.0] * SCALES)
    """Growth per scale, 0 where the gap does not grow."""
    since: int = -1
    """First step of the current series of symptoms; -1: none."""


class ReferenceGap:
    """Size and growth of loss minus reference."""

    name = "reference_gap"

    def start(self) -> ReferenceGapState:
        """The state before any sample."""
        return ReferenceGapState()

    def rolled_back(self, state: ReferenceGapState, step: int) -> ReferenceGapState:
        """Points after `step` are forgotten."""
        keep = sum(seen <= step for seen in state.steps)
        if state.trends.scales:
            state.trends.cut(step)
        return ReferenceGapState(steps=state.steps[:keep], gaps=state.gaps[:keep], trends=state.trends)

    def update(self, state: ReferenceGapState, sample: Sample) -> tuple[ReferenceGapState, list[Symptom]]:
        """Look at one step; steps without a loss and a reference are ignored."""
        loss, reference = sample.scalars.get("loss"), sample.scalars.get("reference_loss")
        if loss is None or reference is None or not math.isfinite(loss) or not math.isfinite(reference):
            return state, []
        state.steps, state.gaps = [*state.steps[1 - BLOCK :], sample.step], [*state.gaps[1 - BLOCK :], loss - reference]
        state.trends.follow(NAMES)
        for i in state.trends.push(np.array([loss - reference]), np.ones(1, dtype=np.bool_), sample.step):
            rise = state.trends.rise(i)
            now = np.where(rise >= GROWTH, rise, 0.0)
            state.growth[i] = float(state.trends.kept(i, np.array([state.growth[i]]), now)[0])
        gap, growth = statistics.median(state.gaps), max(state.growth)
        is_large = len(state.gaps) == BLOCK and gap > tolerance(sample.step)
        if not is_large and not (growth > 0 and gap > 0):
            state.since = -1
            return state, []
        if state.since < 0:
            state.since = state.steps[0] if is_large else state.trends.window(state.growth.index(growth))[0]
        return state, [
            Symptom(
                detector=self.name,
                severity="warn",
                step=sample.step,
                onset_step=state.since,
                evidence={
                    "gap": round(gap, 5),
                    "tolerance": round(tolerance(sample.step), 5),
                    "growth": round(growth, 5) if growth > 0 else None,
                    "reference_loss": reference,
                },
            )
        ]
