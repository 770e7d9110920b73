"""zero_grad: a growing share of the gradient's elements is exactly zero.

Gradients that underflow in the backward casts leave weights without an update. The share is compared with the run's own
lowest block of `BLOCK` observations since warm-up. Warn at 2x and above 1 %; at 3x the evidence says "severe" (Nemotron
3 Super, arXiv 2604.12374: three times BF16's share, 7 % of all parameters, at the end of a run in NVFP4; back to the
usual after a switch to BF16). The lead is of the order of 1e5 steps and the harm is to quality, without divergence, so
it is never an act symptom. Reads the scalar `zero_grad_ratio`, which the training loop gives as
`watch.record(zero_grad_ratio=...)`; no source measures it yet. Source: detector default D11, precursor P5.
"""

from __future__ import annotations

import math
import statistics

import msgspec

from fp8watch.detect.base import Sample, Symptom

BLOCK = 64
"""Observations per block; medians of blocks are compared."""
WARN, SEVERE = 2.0, 3.0
"""Factors over the lowest block."""
LEAST = 0.01
"""Share below which nothing is reported."""
REST = 0.005
"""Smallest share assumed to be ordinary for a run."""


class ZeroGradState(msgspec.Struct):
    """The newest block, and the lowest median of a block so far."""

    newest: list[float] = []
    points: int = 0
    lowest: float = math.inf
    since: int = -1


class ZeroGrad:
    """Share of zero gradient elements, compared with the run's own lowest."""

    name = "zero_grad"

    def start(self) -> ZeroGradState:
        """The state before any sample."""
        return ZeroGradState()

    def rolled_back(self, state: ZeroGradState, step: int) -> ZeroGradState:
        """The current block is undone; the lowest stays."""
        return ZeroGradState(lowest=state.lowest)

    def update(self, state: ZeroGradState, sample: Sample) -> tuple[ZeroGradState, list[Symptom]]:
        """Look at one step; steps without a share are ignored."""
        ratio = sample.scalars.get("zero_grad_ratio")
        if ratio is None or not math.isfinite(ratio) or sample.is_quiet:
            return state, []
        state.newest.append(ratio)
        state.points += 1
        if len(state.newest) > BLOCK:
            del state.newest[0]
        if len(state.newest) < BLOCK:
            return state, []
        middle = statistics.median(state.newest)
        if state.points % BLOCK == 0:
            state.lowest = min(state.lowest, middle)
        times = middle / max(state.lowest, REST)
        if not (math.isfinite(state.lowest) and middle > LEAST and times > WARN):
            state.since = -1
            return state, []
        state.since = sample.step if state.since < 0 else state.since
        return state, [
            Symptom(
                detector=self.name,
                severity="warn",
                step=sample.step,
                onset_step=state.since,
                evidence={
                    "zero_grad_ratio": round(middle, 5),
                    "ordinary_ratio": round(state.lowest, 5),
                    "times": round(times, 2),
                    "is_severe": times > SEVERE,
                },
            )
        ]
