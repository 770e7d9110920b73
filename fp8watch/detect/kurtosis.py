"""kurtosis: the tails of activations grow over thousands of steps.

kappa = mean(x^4) / mean(x^2)^2, 3 for a normal tensor. FOG (arXiv 2505.20524) found that it tells of divergence long
before the loss does, and gives no lead in steps. So its level says little, its growth is what is watched: the
geometric mean over about the last 2,000 steps over that of the last 20,000. 2 is a warning; there is nothing published
that 4 would be enough to act on, so it is never more. Looks at the column `kurtosis` where a source measures it, and at
what the training loop gives as `watch.record(kurtosis=...)`. Source: detector default D10, precursor P6.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.given import given, module_of
from fp8watch.detect.tensors import Array, moved, observed, rows_of, table_of

SHORT, LONG = 2_000.0, 20_000.0
"""Steps of the two means."""
LIMIT = 2.0
"""Times by which the short one exceeds the long one."""
MIN_STEPS = 2_000
"""Steps seen before anything is said."""


class KurtosisState(msgspec.Struct):
    """Both means of log kappa, for each name."""

    names: list[str] = []
    short: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    long: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    first: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Step at which each was first seen."""
    since: Array = msgspec.field(default_factory=lambda: np.full(0, -1, dtype=np.int64))
    last_step: int = -1


class Kurtosis:
    """Two moving means of log kurtosis."""

    name = "kurtosis"

    def start(self) -> KurtosisState:
        """Nothing seen."""
        return KurtosisState()

    def rolled_back(self, state: KurtosisState, step: int) -> KurtosisState:
        """The undone steps have moved means of thousands by little; what was found is found anew."""
        state.since[:] = -1
        state.last_step = min(state.last_step, step)
        return state

    def update(self, state: KurtosisState, sample: Sample) -> tuple[KurtosisState, list[Symptom]]:
        """Look at one step that has a kurtosis; others pass."""
        scalars, column = given(sample, "kurtosis"), observed(sample, "kurtosis")
        if not scalars and column is None:
            return state, []
        names, values = list(scalars), list(scalars.values())
        if column is not None:
            names = [*table_of(sample).names, *names]
            values = [*np.where(column[1], column[0], np.nan), *values]
        self._follow(state, names, sample.step)
        kappa = np.array(values, dtype=np.float64)
        usable = np.isfinite(kappa) & (kappa > 0)
        log = np.log(np.where(usable, kappa, 1.0))
        gap = max(1, sample.step - state.last_step) if state.last_step >= 0 else 1
        state.last_step = sample.step
        fresh = usable & np.isnan(state.long)
        for mean, length in ((state.short, SHORT), (state.long, LONG)):
            mean[fresh] = log[fresh]
            mean[usable] += (1.0 - math.exp(-gap / length)) * (log[usable] - mean[usable])
        ratio = np.exp(np.nan_to_num(state.short - state.long))
        old = sample.step - state.first >= MIN_STEPS
        high = old & (ratio > LIMIT)
        state.since = np.where(high, np.where(state.since >= 0, state.since, sample.step), -1)
        hit = np.flatnonzero(high)
        if not len(hit):
            return state, []
        hit = hit[np.argsort(-ratio[hit], kind="stable")]
        worst, num_columns = int(hit[0]), len(names) - len(scalars)
        return state, [
            Symptom(
                detector=self.name,
                severity="warn",
                step=sample.step,
                onset_step=int(state.since[hit].min()),
                tensors=tuple(int(i) for i in hit if i < num_columns),
                modules=tuple(m for i in hit if i >= num_columns and (m := module_of(names[i]))),
                evidence={"kurtosis": float(kappa[worst]), "growth": round(float(ratio[worst]), 3), "of": names[worst]},
            )
        ]

    def _follow(self, state: KurtosisState, names: list[str], step: int) -> None:
        if moved(names, state.names) is None:
            return
        rows = rows_of(names, state.names)

        def kept(values: Array, fill: float) -> Array:
            result = np.full(len(names), fill, dtype=values.dtype)
            result[rows >= 0] = values[rows[rows >= 0]]
            return result

        state.short, state.long = kept(state.short, np.nan), kept(state.long, np.nan)
        state.first, state.since = kept(state.first, step), kept(state.since, -1)
        state.names = names
