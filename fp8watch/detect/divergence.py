"""divergence: the loss creeps upwards, with no single point out of range.

The last `BLOCKS` blocks of `BLOCK` points are summarised by their medians. Act when every median is above the one
before it (chance 1/5040 for 7 blocks without a trend) and the rise over the window exceeds both 5 % and 8 times the
uncertainty of a block median. The rise is taken without its largest single step, scaled up to the whole window: a spike
or a level shift lifts one block above its neighbour, a drift lifts them all. Warn at half of those limits.
While the spike rule finds the loss out of range, the pipeline does not report divergence as well.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom

BLOCK = 16
BLOCKS = 7
LENGTH = BLOCK * BLOCKS
ACT_RISE = 0.05
"""Rise in log loss over the window."""
ACT_SIGMA = 8.0


class DivergenceState(msgspec.Struct):
    """The newest finite points, log loss."""

    steps: list[int] = []
    values: list[float] = []
    newest: list[float] = []
    """The points of the last block in ascending order."""
    medians: list[float] = []
    """Median of the block that ends at each of the newest points."""


class Divergence:
    """A significant upward trend."""

    name = "divergence"

    def start(self) -> DivergenceState:
        """The state before any sample."""
        return DivergenceState()

    def rolled_back(self, state: DivergenceState, step: int) -> DivergenceState:
        """Points after `step` are forgotten."""
        keep = sum(seen <= step for seen in state.steps)
        again = DivergenceState()
        for seen, value in zip(state.steps[:keep], state.values[:keep], strict=True):
            _take(again, seen, value)
        return again

    def update(self, state: DivergenceState, sample: Sample) -> tuple[DivergenceState, list[Symptom]]:
        """Look at one step."""
        loss = sample.scalars.get("loss")
        if loss is None or not math.isfinite(loss) or loss <= 0:
            return state, []
        _take(state, sample.step, math.log(loss))
        if len(state.medians) < LENGTH - BLOCK + 1:
            return state, []
        # Medians of the block that ends now, of the one that ended BLOCK points ago, and so on.
        medians = state.medians[::BLOCK]
        if any(later <= earlier for earlier, later in itertools.pairwise(medians)):
            return state, []
        blocks = np.asarray(state.values).reshape(BLOCKS, BLOCK)
        spread = 1.4826 * float(np.median(np.abs(blocks - np.asarray(medians)[:, None])))
        uncertainty = max(1.2533 * spread / math.sqrt(BLOCK), 1e-4)
        steps = [later - earlier for earlier, later in itertools.pairwise(medians)]
        rise = (math.fsum(steps) - max(steps)) * (BLOCKS - 1) / (BLOCKS - 2)
        if rise < ACT_RISE / 2 or rise < ACT_SIGMA / 2 * uncertainty:
            return state, []
        is_act = rise >= ACT_RISE and rise >= ACT_SIGMA * uncertainty
        return state, [
            Symptom(
                detector=self.name,
                severity="act" if is_act else "warn",
                step=sample.step,
                onset_step=state.steps[BLOCK // 2],
                evidence={
                    "window_steps": [state.steps[0], state.steps[-1]],
                    "rise_ratio": round(math.expm1(rise), 4),
                    "slope_per_point": round(rise / (BLOCK * (BLOCKS - 1)), 6),
                    "sigmas": round(rise / uncertainty, 1),
                    "advice": "trial in BF16",
                },
            )
        ]


def _take(state: DivergenceState, step: int, value: float) -> None:
    state.steps.append(step)
    state.values.append(value)
    insort(state.newest, value)
    if len(state.newest) > BLOCK:
        del state.newest[bisect_left(state.newest, state.values[-BLOCK - 1])]
    if len(state.newest) == BLOCK:
        state.medians.append((state.newest[BLOCK // 2 - 1] + state.newest[BLOCK // 2]) / 2)
    if len(state.steps) > LENGTH:
        del state.steps[0], state.values[0]
    if len(state.medians) > LENGTH - BLOCK + 1:
        del state.medians[0]
