"""loss_spike: the training loss rises out of its own recent range and stays out.

The loss itself, not its logarithm (its noise is additive, and losses near or below zero exist), is compared with a
robust baseline (`fp8watch.detect.spike`). One point far out that is back at the next is an outlier (an odd batch) and
at most a warning. Three points are a spike; where points are 25 steps or more apart, one is enough if it rises by at
least 25 %. The noise floor is 1.5 % of the loss. The defaults were chosen on public training logs, see
docs/detectors.md.
"""

from __future__ import annotations

import math

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.spike import SpikeRule, SpikeState, cut, judge

RULE = SpikeRule(floor=0.015, warn_sigma=6.0, act_sigma=6.5, act_points=3, act_rise=0.0, is_linear=True)


class LossSpike:
    """Loss far above its baseline."""

    name = "loss_spike"

    def start(self) -> SpikeState:
        """The state before any sample."""
        return SpikeState()

    def rolled_back(self, state: SpikeState, step: int) -> SpikeState:
        """Points after `step` are forgotten."""
        return cut(state, step)

    def update(self, state: SpikeState, sample: Sample) -> tuple[SpikeState, list[Symptom]]:
        """Look at one step; a non-finite loss is left to `nonfinite`."""
        loss = sample.scalars.get("loss")
        if loss is None or not math.isfinite(loss):
            return state, []
        judged = judge(state, RULE, sample.step, loss)
        if judged.severity is None:
            return state, []
        return state, [
            Symptom(
                detector=self.name,
                severity="act" if judged.severity == "act" else "warn",
                step=sample.step,
                onset_step=judged.onset_step,
                rank=sample.rank_of_extreme.get("loss") if sample.num_ranks > 1 else None,
                evidence={
                    "loss": loss,
                    "ordinary_loss": state.baseline.centre,
                    "z": round(judged.z, 2),
                    "num_hot": judged.num_hot,
                },
            )
        ]
