"""crest: a few elements are so far above the rest of a tensor that the rest has no room left in the format.

c = amax / RMS. E4M3 rounds everything below amax / 458,752 to zero, so a normal body loses 1.74e-6 * c * 2^margin of
its elements: 1 % at c = 5,750 (measured on 4.2 M samples; the signal-to-noise ratio *rises* meanwhile and raises no
alarm). The RMS comes from the statistics of sampled steps: sqrt(mse * 10^(snr / 10)). Warn above `LIMIT` and three
times the tensor's own median, in two sampled steps in a row. What is really lost is counted, and acted on, by
`underflow`. E5M2 loses 1.06e-10 * c and is not checked. Source: detector default D4 and precursor P3.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Array, Rows, carried, high_precision, moved, observed, table_of

LIMIT = 1e3
TIMES = 3.0
"""Factor over the tensor's own median, once it has one."""
WINDOW, MIN_BASELINE = 32, 16
STEPS = 2
"""Sampled steps in a row above the limit."""
LOST_PER_CREST = 1.74e-6
"""Share of a normal body that E4M3 rounds to zero, per unit of c at margin 0."""


class CrestState(msgspec.Struct):
    """log2 of ordinary crest factors, and for how many sampled steps each tensor has been above its limit."""

    ordinary: Rows = msgspec.field(default_factory=Rows)
    over: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    onset: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class Crest:
    """amax / RMS of E4M3 tensors."""

    name = "crest"
    of_tensors = True

    def start(self) -> CrestState:
        """The state before any sample."""
        return CrestState()

    def rolled_back(self, state: CrestState, step: int) -> CrestState:
        """Ordinary values stay valid; the running counts are undone."""
        state.over[:] = 0
        return state

    def update(self, state: CrestState, sample: Sample) -> tuple[CrestState, list[Symptom]]:
        """Look at one sampled step; other steps are ignored."""
        amax, mse, snr = observed(sample, "amax"), observed(sample, "mse"), observed(sample, "snr")
        if amax is None or mse is None or snr is None:
            return state, []
        table = table_of(sample)
        order = moved(table.names, state.ordinary.names)
        if order is not None:
            state.over, state.onset = carried(state.over, order, 0), carried(state.onset, order, 0)
        state.ordinary.follow(table.names, WINDOW)
        with np.errstate(all="ignore"):
            crest = amax[0] / np.sqrt(mse[0] * 10.0 ** (snr[0] / 10.0))
        usable = amax[1] & mse[1] & snr[1] & np.isfinite(crest) & (crest > 0) & table.is_e4m3 & ~high_precision(sample)
        crest = np.where(usable, crest, 1.0)
        high = usable & (crest > LIMIT)
        past = np.flatnonzero(high & (state.ordinary.held >= MIN_BASELINE))
        if len(past):
            high[past] = crest[past] > TIMES * 2.0 ** state.ordinary.median(past)
        state.onset = np.where(high & (state.over == 0), sample.step, state.onset)
        state.over = np.where(high, state.over + 1, np.where(usable, 0, state.over))
        # Without a past, a high value may be normal for this tensor: it counts as ordinary until the baseline is full.
        state.ordinary.push(np.log2(crest), usable & (~high | (state.ordinary.held < MIN_BASELINE)))
        hit = np.flatnonzero(state.over >= STEPS)
        if not len(hit):
            return state, []
        hit = hit[np.argsort(-crest[hit], kind="stable")]
        worst = int(hit[0])
        return state, [
            Symptom(
                detector=self.name,
                severity="warn",
                step=sample.step,
                onset_step=int(state.onset[hit].min()),
                tensors=tuple(int(row) for row in hit),
                rank=sample.rank_of_extreme.get("amax"),
                evidence={
                    "crest": round(float(crest[worst]), 1),
                    "expected_underflow_ratio": float(
                        LOST_PER_CREST * crest[worst] * 2.0 ** table.columns[worst].margin
                    ),
                    "num_tensors": len(hit),
                },
            )
        ]
