"""grad_spike: the gradient norm (before clipping) leaves its own recent range and stays out, or does so repeatedly.

The logarithm of the norm that the optimizer gets (at most the clip limit, where that is known) is compared with a
robust baseline (`fp8watch.detect.spike`) with a noise floor of 10 %. Single bursts are normal: a warning. Act on
- 5 hot points in a row that reach e^1.6 = 5x;
- recurring bursts: two or more of at least 5x within 64 points that together rise by 4 powers of ten (two of 100x,
  three of 22x);
- a single burst of 100x that a known clip limit lets through (a log does not say the limit, and healthy logs show such
  bursts);
- a norm before clipping 10,000x above the centre: it is on its way to infinity, which no clipping can repair. From
  1,000x on that is a warning.
"""

from __future__ import annotations

import math

import msgspec

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.spike import HOT, MIN_POINTS, SpikeRule, SpikeState, cut, judge

RULE = SpikeRule(floor=0.1, warn_sigma=6.0, act_sigma=8.0, act_points=5, act_rise=1.6, sparse_stride=2**62)
BURST_RISE = 1.6
"""Rise in log x from which a point is a burst (5x)."""
BURSTS = 2
BURST_DECADES = 4.0
"""Powers of ten by which the bursts of the window must rise above the centre, added up."""
BURST_WINDOW = 64
"""In points."""
FELT_RISE = math.log(100)
"""Rise of the norm after clipping (where the limit is known) on which a single point is acted on."""
WARN_RAW_RISE, ACT_RAW_RISE = math.log(1e3), math.log(1e4)
"""Rise of the norm before clipping above the centre."""


class GradSpikeState(msgspec.Struct):
    """The spike rule's state, and when bursts began."""

    spike: SpikeState = msgspec.field(default_factory=SpikeState)
    points: int = 0
    bursts: list[tuple[int, int, float]] = []
    """(point number, step, decades above the centre) of the first point of each burst within the window."""
    is_in_burst: bool = False


class GradSpike:
    """Gradient norm far above its baseline."""

    name = "grad_spike"

    def start(self) -> GradSpikeState:
        """The state before any sample."""
        return GradSpikeState()

    def rolled_back(self, state: GradSpikeState, step: int) -> GradSpikeState:
        """Points after `step` are forgotten; bursts that happened before it did happen."""
        state.bursts = [burst for burst in state.bursts if burst[1] <= step]
        state.is_in_burst = False
        cut(state.spike, step)
        return state

    def update(self, state: GradSpikeState, sample: Sample) -> tuple[GradSpikeState, list[Symptom]]:
        """Look at one step."""
        norm = sample.scalars.get("grad_norm")
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return state, []
        state.points += 1
        limit = sample.scalars.get("clip_limit", math.inf)
        felt = min(norm, limit) if limit > 0 else norm
        judged = judge(state.spike, RULE, sample.step, math.log(felt))
        raw_rise = math.log(norm) - state.spike.baseline.centre if len(state.spike.baseline) >= MIN_POINTS else 0.0
        is_burst = judged.rise > BURST_RISE and judged.z > HOT
        if is_burst and not state.is_in_burst:
            state.bursts.append((state.points, sample.step, judged.rise / math.log(10)))
        state.is_in_burst = is_burst
        state.bursts = [burst for burst in state.bursts if state.points - burst[0] < BURST_WINDOW]
        decades = sum(burst[2] for burst in state.bursts)
        recurs = is_burst and len(state.bursts) >= BURSTS and decades >= BURST_DECADES
        if judged.severity is None and not recurs and raw_rise < WARN_RAW_RISE:
            return state, []
        is_unbraked = math.isfinite(limit) and judged.z > HOT and judged.rise > FELT_RISE
        is_act = judged.severity == "act" or recurs or is_unbraked or raw_rise > ACT_RAW_RISE
        return state, [
            Symptom(
                detector=self.name,
                severity="act" if is_act else "warn",
                step=sample.step,
                onset_step=state.bursts[0][1] if recurs else judged.onset_step,
                rank=sample.rank_of_extreme.get("grad_norm") if sample.num_ranks > 1 else None,
                evidence={
                    "grad_norm": norm,
                    "clip_limit": limit if math.isfinite(limit) else None,
                    "ordinary_grad_norm": math.exp(state.spike.baseline.centre),
                    "z": round(judged.z, 2),
                    "num_hot": judged.num_hot,
                    "bursts": len(state.bursts),
                    "is_recurring": recurs,
                },
            )
        ]
