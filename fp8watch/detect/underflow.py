"""underflow: elements that were not zero become zero in the cast.

Counted on sampled steps: `underflowed / quantized`. What is ordinary differs by tensor, so the share is held
against the tensor's own past, and must stay for 2 sampled steps in a row (3 to act): warn above 1 % and 3x its
median.
Whether it hurts is another question: attention's gradients lose 40 % of their elements in runs that train, at an
undiminished signal-to-noise ratio, because a few large elements carry them. So to act takes more than 10 % and 3x
the median together with a loss of 3 dB against the tensor's own median ratio, or more than 60 %, at which nothing
is left of the body whatever the ratio says (one huge element gives an excellent one). A tensor without a past
(fewer than `MIN_BASELINE` sampled steps) acts above 60 % only.
Source: detector default D4 (1 %, 3x), the rest from emulated runs of a small GPT, healthy and not; for a normal
tensor the share is 1.74e-6 * amax/sigma in E4M3.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Array, Rows, names_of, observed

WINDOW = 32
"""Ordinary sampled steps that make a tensor's baseline."""
MIN_BASELINE = 16
WARN_RATIO = 0.01
ACT_RATIO = 0.1
TIMES = 3.0
"""Times its own median, for both."""
ACT_LOSS_DB = 3.0
"""Decibels below the tensor's median signal-to-noise ratio."""
ACT_ALONE = 0.6
"""Share that is acted on whatever the signal-to-noise ratio is."""
WARN_STEPS, ACT_STEPS = 2, 3
"""Sampled steps in a row."""


class UnderflowState(msgspec.Struct):
    """Ordinary shares a tensor, and for how many sampled steps it has been out of them."""

    ordinary: Rows = msgspec.field(default_factory=Rows)
    snr: Rows = msgspec.field(default_factory=Rows)
    """Signal-to-noise ratios of the same steps, dB."""
    over: dict[str, int] = {}
    hurt: dict[str, int] = {}
    """For how many it has been bad enough to act."""
    onset: dict[str, int] = {}


class Underflow:
    """Share of underflowed elements against the tensor's own past."""

    name = "underflow"

    def start(self) -> UnderflowState:
        """No baseline."""
        return UnderflowState()

    def rolled_back(self, state: UnderflowState, step: int) -> UnderflowState:
        """Baselines hold only ordinary shares and stay true; what was under way is not."""
        state.over, state.hurt, state.onset = {}, {}, {}
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
        lost_db = self._lost_db(state, sample, names)
        is_hurt = has_past & (share > np.maximum(ACT_RATIO, TIMES * median)) & (lost_db > ACT_LOSS_DB)
        is_gone = share > np.where(has_past, np.maximum(ACT_ALONE, TIMES * median.clip(max=0.3)), ACT_ALONE)
        warn_limit = np.where(has_past, np.maximum(WARN_RATIO, TIMES * median), ACT_ALONE)
        act, warn = usable & (is_hurt | is_gone), usable & (share > warn_limit)
        state.over = {names[i]: state.over.get(names[i], 0) + 1 for i in np.flatnonzero(warn | act)}
        state.onset = {names[i]: state.onset.get(names[i], sample.step) for i in np.flatnonzero(warn | act)}
        rows = np.flatnonzero(usable & ~warn & ~act)
        state.ordinary.push(rows, share[rows])
        ratio = observed(sample, "snr")
        if ratio is not None:
            state.snr.push(rows, np.where(ratio[1] & np.isfinite(ratio[0]), ratio[0], np.nan)[rows])
        state.hurt = {names[i]: state.hurt.get(names[i], 0) + 1 for i in np.flatnonzero(act)}
        lasting = [int(i) for i in np.flatnonzero(warn | act) if state.over[names[int(i)]] >= WARN_STEPS]
        persistent = [i for i in lasting if state.hurt.get(names[i], 0) >= ACT_STEPS]
        hit = persistent or lasting
        if not hit:
            return state, []
        order = sorted(hit, key=lambda i: -float(share[i]))
        worst = order[0]
        evidence: dict[str, Any] = {
            "underflowed_ratio": float(share[worst]),
            "ordinary_ratio": float(median[worst]) if has_past[worst] else None,
            "snr_loss_db": round(float(lost_db[worst]), 1) if lost_db[worst] > -np.inf else None,
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

    def _lost_db(self, state: UnderflowState, sample: Sample, names: list[str]) -> Array:
        """[num_tensors] dB below the tensor's median signal-to-noise ratio; -inf where it is not observed."""
        state.snr.follow(names, WINDOW)
        ratio = observed(sample, "snr")
        if ratio is None:
            return np.full(len(names), -np.inf)
        median = state.snr.median()
        usable = ratio[1] & np.isfinite(ratio[0]) & np.isfinite(median)
        return np.where(usable, median - ratio[0], -np.inf)
