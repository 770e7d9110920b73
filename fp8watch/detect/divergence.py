"""divergence: the loss creeps upwards, with no single point out of range.

The last `BLOCKS` blocks of `BLOCK` points are summed up by their medians. Act when every median is above the one
before it (chance 1/5040 for 7 blocks without trend) and the rise over the window is beyond both 5 % and 8 times
the uncertainty of a block median, with the largest single step left out (and the rest scaled up to the whole
window): warn at half of that. A spike or a level shift lifts one block above the other; a drift lifts them all.
While the loss is out of its range by the spike rule, the pipeline reports no divergence beside it.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom

BLOCK = 16
BLOCKS = 7
ACT_RISE = 0.05
"""Rise in log loss over the window."""
ACT_SIGMA = 8.0


class DivergenceState(msgspec.Struct):
    """The newest finite points, log loss."""

    steps: list[int] = []
    values: list[float] = []


class Divergence:
    """A trend upwards, with confidence."""

    name = "divergence"

    def start(self) -> DivergenceState:
        """No points."""
        return DivergenceState()

    def rolled_back(self, state: DivergenceState, step: int) -> DivergenceState:
        """Points after `step` are forgotten."""
        keep = sum(seen <= step for seen in state.steps)
        state.steps, state.values = state.steps[:keep], state.values[:keep]
        return state

    def update(self, state: DivergenceState, sample: Sample) -> tuple[DivergenceState, list[Symptom]]:
        """Look at one step."""
        loss = sample.scalars.get("loss")
        if loss is None or not math.isfinite(loss) or loss <= 0:
            return state, []
        state.steps.append(sample.step)
        state.values.append(math.log(loss))
        if len(state.steps) > BLOCK * BLOCKS:
            del state.steps[0], state.values[0]
        if len(state.steps) < BLOCK * BLOCKS:
            return state, []
        blocks = np.asarray(state.values).reshape(BLOCKS, BLOCK)
        medians = np.median(blocks, axis=1)
        if not (np.diff(medians) > 0).all():
            return state, []
        spread = 1.4826 * float(np.median(np.abs(blocks - medians[:, None])))
        uncertainty = max(1.2533 * spread / math.sqrt(BLOCK), 1e-4)
        steps = np.diff(medians)
        rise = float(steps.sum() - steps.max()) * (BLOCKS - 1) / (BLOCKS - 2)
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
