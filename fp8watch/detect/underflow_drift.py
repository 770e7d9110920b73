"""underflow_drift: the share of elements that the cast turns into zeros grows slowly.

The level rule (`underflow`) compares a share with the median of the newest sampled steps, and that median follows a
drift: a share that doubles every few hundred sampled steps never reaches three times its own. Here log2 of the share
(shares below `SMALLEST` count as that) is averaged over blocks of sampled steps on three time scales
(`fp8watch.detect.drift`). Warn where it rises steadily by `LIMIT_LOG2` (3x, the factor of the level rule) more than the
median tensor of its kind, and has reached `WARN_RATIO`. Act where more than `ACT_RATIO` of the elements are lost and
the signal-to-noise ratio has lost `ACT_LOSS_DB` over the same window: the limits of the level rule, compared with the
window's beginning.
Source: detector default D4 (1 %, 3x), on the time scales of D3's drift; zeroed gradients grew for whole trainings in
NVFP4 (arXiv 2604.12374).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.drift import SCALES, Trends, beyond_peers
from fp8watch.detect.tensors import Array, carried, high_precision, moved, observed, share_of, table_of
from fp8watch.detect.underflow import ACT_LOSS_DB, ACT_RATIO, TIMES, WARN_RATIO

SMALLEST = 1e-4
"""Share below which growth means nothing: a few elements of a small tensor."""
LIMIT_LOG2 = math.log2(TIMES)
DB_A_BIT = 20.0 * math.log10(2.0)
"""Decibels per factor of two in amplitude: signal-to-noise ratios are averaged in this unit."""


class UnderflowDriftState(msgspec.Struct):
    """Trends of the shares and of the signal-to-noise ratios, and the latest verdict on each time scale."""

    shares: Trends = msgspec.field(default_factory=Trends)
    ratios: Trends = msgspec.field(default_factory=Trends)
    excess: Array = msgspec.field(default_factory=lambda: np.zeros((0, SCALES), dtype=np.float32))
    """[num_tensors, SCALES] bits above the peers, 0 where a share does not drift."""
    lost_db: Array = msgspec.field(default_factory=lambda: np.zeros((0, SCALES), dtype=np.float32))
    """[num_tensors, SCALES] dB that the signal-to-noise ratio has lost over the window, NaN where unknown."""


class UnderflowDrift:
    """Slow growth of the underflowed share, compared with the tensor's peers."""

    name = "underflow_drift"
    of_tensors = True

    def start(self) -> UnderflowDriftState:
        """The state before any sample."""
        return UnderflowDriftState()

    def rolled_back(self, state: UnderflowDriftState, step: int) -> UnderflowDriftState:
        """Blocks after `step` are forgotten."""
        state.shares.cut(step)
        state.ratios.cut(step)
        state.excess[:], state.lost_db[:] = 0, np.nan
        return state

    def update(self, state: UnderflowDriftState, sample: Sample) -> tuple[UnderflowDriftState, list[Symptom]]:
        """Look at one sampled step; other steps are ignored. Verdicts change only when a block ends."""
        counted = share_of(sample, "underflowed", high_precision(sample))
        if counted is None:
            return state, []
        share, usable = counted
        table = table_of(sample)
        order = moved(table.names, state.shares.names)
        if order is not None:
            state.excess, state.lost_db = carried(state.excess, order, 0), carried(state.lost_db, order, np.nan)
        state.shares.follow(table.names)
        state.ratios.follow(table.names)
        snr = observed(sample, "snr")
        known = usable & snr[1] & np.isfinite(snr[0]) if snr is not None else np.zeros(len(usable), dtype=np.bool_)
        state.ratios.push(np.where(known, 0.0 if snr is None else snr[0], 0.0) / DB_A_BIT, known, sample.step)
        for i in state.shares.push(np.log2(np.maximum(share, SMALLEST)), usable, sample.step):
            # The same limit without peers: unlike an amax, a share of zeros has no reason to grow.
            now = beyond_peers(state.shares.rise(i), table.kinds, LIMIT_LOG2, LIMIT_LOG2)
            state.excess[:, i] = state.shares.kept(i, state.excess[:, i], now)
            state.lost_db[:, i] = -state.ratios.change(i) * DB_A_BIT
        drifting = (state.excess > 0) & usable[:, None] & (share >= WARN_RATIO)[:, None]
        if not drifting.any():
            return state, []
        with np.errstate(invalid="ignore"):
            hurt = drifting & (share > ACT_RATIO)[:, None] & (state.lost_db > ACT_LOSS_DB)
        return state, [_symptom(state, sample, hurt if hurt.any() else drifting, share, is_act=bool(hurt.any()))]


def _symptom(state: UnderflowDriftState, sample: Sample, hit: Array, share: Array, *, is_act: bool) -> Symptom:
    most = np.where(hit, state.excess, 0.0)
    rows = np.flatnonzero(hit.any(axis=1))
    rows = rows[np.argsort(-share[rows], kind="stable")]
    worst = int(rows[0])
    i = int(most[worst].argmax())
    first, length = state.shares.window(i)
    lost = float(state.lost_db[worst, i])
    return Symptom(
        detector=UnderflowDrift.name,
        severity="act" if is_act else "warn",
        step=sample.step,
        onset_step=first,
        tensors=tuple(int(row) for row in rows),
        evidence={
            "rise_log2": round(float(state.excess[worst, i]), 3),
            "window_steps": [first, sample.step],
            "window_points": length,
            "underflowed_ratio": float(share[worst]),
            "snr_loss_db": round(lost, 1) if math.isfinite(lost) else None,
            "kind": sample.tensors[worst].tensor,
            "num_tensors": len(rows),
        },
    )
