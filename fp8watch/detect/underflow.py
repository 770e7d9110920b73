"""underflow: elements that were not zero become zero in the cast.

Counted on sampled steps: `underflowed / quantized`. What is ordinary differs by tensor (E4M3 activations
after a gate may lose percents, E5M2 gradients about nothing), so the share is held against the tensor's own
past, and must stay for 2 sampled steps in a row: warn above 1 % and 2x its median, act above 5 % and 3x its
median. A tensor without a past (fewer than `MIN_BASELINE` sampled steps) acts above 50 % only.
Source: detector default D4 (1 %, 5 %, 3x); for a normal tensor the share is 1.74e-6 * amax/sigma in E4M3.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Rows, names_of, observed

WINDOW = 32
"""Ordinary sampled steps that make a tensor's baseline."""
MIN_BASELINE = 8
WARN_RATIO, WARN_TIMES = 0.01, 2.0
ACT_RATIO, ACT_TIMES = 0.05, 3.0
ACT_WITHOUT_BASELINE = 0.5
PERSISTENCE = 2
"""Sampled steps in a row."""


class UnderflowState(msgspec.Struct):
    """Ordinary shares a tensor, and for how many sampled steps it has been out of them."""

    ordinary: Rows = msgspec.field(default_factory=Rows)
    over: dict[str, int] = {}
    onset: dict[str, int] = {}


class Underflow:
    """Share of underflowed elements against the tensor's own past."""

    name = "underflow"

    def start(self) -> UnderflowState:
        """No baseline."""
        return UnderflowState()

    def rolled_back(self, state: UnderflowState, step: int) -> UnderflowState:
        """Baselines hold only ordinary shares and stay true; what was under way is not."""
        state.over, state.onset = {}, {}
        return state

    def update(self, state: UnderflowState, sample: Sample) -> tuple[UnderflowState, list[Symptom]]:
        """Look at one sampled step; others pass."""
        lost, quantized = observed(sample, "underflowed"), observed(sample, "quantized")
        if lost is None or quantized is None:
            return state, []
        names = names_of(sample)
        state.ordinary.follow(names, WINDOW)
        high = sample.values.get("high_precision", np.zeros(len(names), np.uint8)).astype(np.bool_)
        usable = lost[1] & quantized[1] & (quantized[0] > 0) & ~high
        share = np.where(usable, lost[0] / np.maximum(quantized[0], 1), 0.0)
        has_past = state.ordinary.count() >= MIN_BASELINE
        median = np.nan_to_num(state.ordinary.median())
        act_limit = np.where(has_past, np.maximum(ACT_RATIO, ACT_TIMES * median), ACT_WITHOUT_BASELINE)
        warn_limit = np.where(has_past, np.maximum(WARN_RATIO, WARN_TIMES * median), ACT_WITHOUT_BASELINE)
        act, warn = usable & (share > act_limit), usable & (share > warn_limit)
        state.over = {names[i]: state.over.get(names[i], 0) + 1 for i in np.flatnonzero(warn | act)}
        state.onset = {names[i]: state.onset.get(names[i], sample.step) for i in np.flatnonzero(warn | act)}
        rows = np.flatnonzero(usable & ~warn & ~act)
        state.ordinary.push(rows, share[rows])
        lasting = [int(i) for i in np.flatnonzero(warn | act) if state.over[names[int(i)]] >= PERSISTENCE]
        persistent = [i for i in lasting if act[i]]
        hit = persistent or lasting
        if not hit:
            return state, []
        order = sorted(hit, key=lambda i: -float(share[i]))
        worst = order[0]
        evidence: dict[str, Any] = {
            "underflowed_ratio": float(share[worst]),
            "ordinary_ratio": float(median[worst]) if has_past[worst] else None,
            "num_tensors": len(order),
        }
        return state, [
            Symptom(
                detector=self.name,
                severity="act" if persistent else "warn",
                step=sample.step,
                onset_step=min(state.onset[names[i]] for i in order),
                tensors=tuple(order),
                evidence=evidence,
            )
        ]
