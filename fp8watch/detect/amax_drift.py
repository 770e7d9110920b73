"""amax_drift: a tensor's amax grows slowly, and more than the amax of its peers.

Outliers of SwiGLU and of attention grow over thousands of steps; from one step to the next nothing shows (arXiv
2409.12517: after 200 billion tokens). Every amax moves while a model is young, so a tensor is compared with the other
tensors of its kind (inputs, weights, ...). It is a warning when log2(amax) rises steadily (`fp8watch.detect.drift`) by
`LIMIT_LOG2` more than the median tensor of the kind, on any of three time scales. A kind of fewer than
`fp8watch.detect.drift.MIN_PEERS` tensors has no such median; there the limit is `ALONE_LOG2`.
A drift does no harm as long as the scale follows it, so it is never more than a warning.
Source: precursor P2 (a bit in 1,000 steps; here a bit in 224, 1,792 or 14,336 steps), detector default D3.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.drift import SCALES, Trends, beyond_peers
from fp8watch.detect.tensors import Array, carried, moved, observed, table_of

LIMIT_LOG2 = 1.0
"""Bits above its peers within a window."""
ALONE_LOG2 = 3.0
"""Bits within a window, where there are no peers to compare with."""


class AmaxDriftState(msgspec.Struct):
    """Trends, and the latest verdict on each time scale."""

    trends: Trends = msgspec.field(default_factory=Trends)
    excess: Array = msgspec.field(default_factory=lambda: np.zeros((0, SCALES), dtype=np.float32))
    """[num_tensors, SCALES] bits above the peers, 0 where a tensor does not drift."""


class AmaxDrift:
    """Slow growth of log2 amax, compared with the tensor's peers."""

    name = "amax_drift"
    of_tensors = True

    def start(self) -> AmaxDriftState:
        """The state before any sample."""
        return AmaxDriftState()

    def rolled_back(self, state: AmaxDriftState, step: int) -> AmaxDriftState:
        """Blocks after `step` are forgotten."""
        state.trends.cut(step)
        state.excess[:] = 0
        return state

    def update(self, state: AmaxDriftState, sample: Sample) -> tuple[AmaxDriftState, list[Symptom]]:
        """Look at one step. Verdicts change only when a block ends."""
        column = observed(sample, "amax")
        if column is None:
            return state, []
        table = table_of(sample)
        order = moved(table.names, state.trends.names)
        if order is not None:
            state.excess = carried(state.excess, order, 0)
        state.trends.follow(table.names)
        usable = column[1] & np.isfinite(column[0]) & (column[0] > 0)
        for i in state.trends.push(np.log2(np.where(usable, column[0], 1.0)), usable, sample.step):
            now = beyond_peers(state.trends.rise(i), table.kinds, LIMIT_LOG2, ALONE_LOG2)
            state.excess[:, i] = state.trends.kept(i, state.excess[:, i], now)
        if not state.excess.any():
            return state, []
        most = state.excess.max(axis=1)
        hit = np.flatnonzero(most > 0)
        hit = hit[np.argsort(-most[hit], kind="stable")]
        worst = int(hit[0])
        i = int(state.excess[worst].argmax())
        first, length = state.trends.window(i)
        bits = float(state.excess[worst, i])
        return state, [
            Symptom(
                detector=self.name,
                severity="warn",
                step=sample.step,
                onset_step=first,
                tensors=tuple(int(row) for row in hit),
                rank=sample.rank_of_extreme.get("amax"),
                evidence={
                    "rise_log2": round(bits, 3),
                    "window_steps": [first, sample.step],
                    "window_points": length,
                    "amax": float(column[0][worst]),
                    "kind": sample.tensors[worst].tensor,
                    "num_tensors": len(hit),
                },
            )
        ]
