"""underflow: elements that were not zero become zero in the cast.

Counted on sampled steps: `underflowed / quantized`. What is ordinary differs by tensor, so the share is compared with
the tensor's own past. Warn above 1 % and 3x its median, in 2 sampled steps in a row.
Whether it does harm is another question: attention's gradients lose 40 % of their elements in runs that train well, at
an undiminished signal-to-noise ratio, because a few large elements carry them. So acting needs 3 sampled steps in a row
with either more than 10 % and 3x the median together with a loss of 3 dB against the tensor's own median ratio, or more
than 60 %, where nothing is left of the body whatever the ratio says (one huge element makes it excellent). A tensor
without a past (fewer than `MIN_BASELINE` sampled steps) acts above 60 % only.
Source: detector default D4 (1 %, 3x), the rest from emulated runs of a small GPT, healthy and not; for a normal tensor
the share is 1.74e-6 * amax/sigma in E4M3.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Array, Rows, carried, high_precision, moved, observed, share_of, table_of

WINDOW = 32
"""Length of a tensor's baseline, in ordinary sampled steps."""
MIN_BASELINE = 16
WARN_RATIO = 0.01
ACT_RATIO = 0.1
TIMES = 3.0
"""Factor over the tensor's own median, to warn and to act."""
ACT_LOSS_DB = 3.0
"""Decibels below the tensor's median signal-to-noise ratio, to act."""
ACT_ALONE = 0.6
"""Share to act on, whatever the signal-to-noise ratio is."""
WARN_STEPS, ACT_STEPS = 2, 3
"""In sampled steps in a row."""


class UnderflowState(msgspec.Struct):
    """Ordinary shares of each tensor, and for how many sampled steps it has been above them."""

    ordinary: Rows = msgspec.field(default_factory=Rows)
    snr: Rows = msgspec.field(default_factory=Rows)
    """Signal-to-noise ratios of the same steps, in dB."""
    over: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_tensors] sampled steps in a row above the limit to warn."""
    hurt: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_tensors] sampled steps in a row above the limit to act."""
    onset: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class Underflow:
    """Share of underflowed elements, compared with the tensor's own past."""

    name = "underflow"
    of_tensors = True

    def start(self) -> UnderflowState:
        """The state before any sample."""
        return UnderflowState()

    def rolled_back(self, state: UnderflowState, step: int) -> UnderflowState:
        """Baselines hold only ordinary shares and stay valid; the running counts are undone."""
        state.over[:], state.hurt[:], state.onset[:] = 0, 0, 0
        return state

    def update(self, state: UnderflowState, sample: Sample) -> tuple[UnderflowState, list[Symptom]]:
        """Look at one sampled step; other steps are ignored."""
        counted = share_of(sample, "underflowed", high_precision(sample))
        if counted is None:
            return state, []
        share, usable = counted
        table = table_of(sample)
        order = moved(table.names, state.ordinary.names)
        if order is not None:
            state.over, state.hurt = carried(state.over, order, 0), carried(state.hurt, order, 0)
            state.onset = carried(state.onset, order, 0)
        state.ordinary.follow(table.names, WINDOW)
        has_past = state.ordinary.held >= MIN_BASELINE
        median = np.nan_to_num(state.ordinary.median(np.arange(len(share))))
        lost_db = self._lost_db(state, sample, table.names)
        is_hurt = has_past & (share > np.maximum(ACT_RATIO, TIMES * median)) & (lost_db > ACT_LOSS_DB)
        is_gone = share > np.where(has_past, np.maximum(ACT_ALONE, TIMES * median.clip(max=0.3)), ACT_ALONE)
        warn_limit = np.where(has_past, np.maximum(WARN_RATIO, TIMES * median), ACT_ALONE)
        act, warn = usable & (is_hurt | is_gone), usable & (share > warn_limit)
        either = warn | act
        state.onset = np.where(either, np.where(state.over > 0, state.onset, sample.step), 0)
        state.over = np.where(either, state.over + 1, 0)
        state.hurt = np.where(act, state.hurt + 1, 0)
        ordinary = usable & ~either
        state.ordinary.push(share, ordinary)
        ratio = observed(sample, "snr")
        if ratio is not None:
            state.snr.push(np.where(ratio[1] & np.isfinite(ratio[0]), ratio[0], np.nan), ordinary)
        lasting = either & (state.over >= WARN_STEPS)
        persistent = lasting & (state.hurt >= ACT_STEPS)
        hit = np.flatnonzero(persistent) if persistent.any() else np.flatnonzero(lasting)
        if not len(hit):
            return state, []
        worst_first = [int(i) for i in hit[np.argsort(-share[hit], kind="stable")]]
        worst = worst_first[0]
        evidence: dict[str, Any] = {
            "underflowed_ratio": float(share[worst]),
            "ordinary_ratio": float(median[worst]) if has_past[worst] else None,
            "snr_loss_db": round(float(lost_db[worst]), 1) if lost_db[worst] > -np.inf else None,
            "num_tensors": len(worst_first),
        }
        return state, [
            Symptom(
                detector=self.name,
                severity="act" if persistent.any() else "warn",
                step=sample.step,
                onset_step=min(int(state.onset[i]) for i in worst_first),
                tensors=tuple(worst_first),
                evidence=evidence,
            )
        ]

    def _lost_db(self, state: UnderflowState, sample: Sample, names: list[str]) -> Array:
        """[num_tensors] dB below the tensor's median signal-to-noise ratio; -inf where not observed."""
        state.snr.follow(names, WINDOW)
        ratio = observed(sample, "snr")
        if ratio is None:
            return np.full(len(names), -np.inf)
        median = state.snr.median(np.arange(len(names)))
        usable = ratio[1] & np.isfinite(ratio[0]) & np.isfinite(median)
        return np.where(usable, median - ratio[0], -np.inf)
