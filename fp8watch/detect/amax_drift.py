"""amax_drift: a tensor's amax grows slowly, and further than those of its kind.

Outliers of SwiGLU and of attention grow over thousands of steps, with nothing to see from one step to the next
(arXiv 2409.12517: after 200 billion tokens). All amaxes move while a young model learns, so a tensor is held against
the others of its kind (inputs, weights, ...): a warning where log2(amax) rises steadily (`fp8watch.detect.drift`)
by `LIMIT_LOG2` more than the median tensor of the kind does, on any of three time scales. With fewer than `MIN_PEERS`
tensors of a kind there is nothing to hold it against, and it takes `ALONE_LOG2`.
A drift by itself harms nothing as long as the scale follows: it is never more than a warning.
Source: precursor P2 (a bit in 1,000 steps; here a bit in 224, 1,792 or 14,336 steps), detector default D3.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.drift import SCALES, Trends
from fp8watch.detect.tensors import Array, Table, carried, moved, observed, table_of

LIMIT_LOG2 = 1.0
"""Bits above its peers within a window."""
MIN_PEERS = 4
ALONE_LOG2 = 3.0
"""Bits within a window where there are no peers."""


class AmaxDriftState(msgspec.Struct):
    """Trends, and what each scale's last look found."""

    trends: Trends = msgspec.field(default_factory=Trends)
    excess: Array = msgspec.field(default_factory=lambda: np.zeros((0, SCALES), dtype=np.float32))
    """[num_tensors, SCALES] bits above the peers, 0 where a tensor does not drift."""


class AmaxDrift:
    """Slow growth of log2 amax against the tensor's peers."""

    name = "amax_drift"
    of_tensors = True

    def start(self) -> AmaxDriftState:
        """Nothing seen."""
        return AmaxDriftState()

    def rolled_back(self, state: AmaxDriftState, step: int) -> AmaxDriftState:
        """Blocks after `step` are forgotten."""
        state.trends.cut(step)
        state.excess[:] = 0
        return state

    def update(self, state: AmaxDriftState, sample: Sample) -> tuple[AmaxDriftState, list[Symptom]]:
        """Look at one step; verdicts change when a block ends."""
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
            now = _beyond_peers(state.trends.rise(i), table)
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


def _beyond_peers(rise: Array, table: Table) -> Array:
    """[num_tensors] rise above the median of the kind where it is beyond the limit, else 0."""
    excess = rise.copy()
    for kind in np.unique(table.kinds[rise > 0]):
        peers = table.kinds == kind
        alone = int(peers.sum()) < MIN_PEERS
        limit = ALONE_LOG2 if alone else LIMIT_LOG2
        beyond = rise[peers] - (0.0 if alone else np.median(rise[peers]))
        excess[peers] = np.where(beyond >= limit, beyond, 0.0)
    return excess
