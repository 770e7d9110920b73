"""kurtosis: the tails of activations grow over thousands of steps.

kappa = mean(x^4) / mean(x^2)^2, which is 3 for a normal tensor. FOG (arXiv 2505.20524) found that it announces
divergence long before the loss does, but gives no lead in steps. Its level says little, so its growth is watched: the
geometric mean over about the last 2,000 steps, divided by that over the last 20,000. Above 2 it is a warning. Nothing
published says that, say, 4 would be enough to act on, so it is never more. Reads the column `kurtosis` where a source
measures it, and what the training loop gives as `watch.record(kurtosis=...)`. Source: detector default D10, precursor
P6.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.given import given, module_of
from fp8watch.detect.tensors import Array, carried, moved, observed, table_of

SHORT, LONG = 2_000.0, 20_000.0
"""Lengths of the two means, in steps."""
LIMIT = 2.0
"""Largest ratio of the short mean to the long one that is not reported."""
MIN_STEPS = 2_000
"""Steps before anything is reported."""


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
        """The state before any sample."""
        return KurtosisState()

    def rolled_back(self, state: KurtosisState, step: int) -> KurtosisState:
        """The undone steps have hardly moved means of thousands; a finding is made again if it is still true."""
        state.since[:] = -1
        state.last_step = min(state.last_step, step)
        return state

    def update(self, state: KurtosisState, sample: Sample) -> tuple[KurtosisState, list[Symptom]]:
        """Look at one step; steps without a kurtosis are ignored."""
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
        rows = moved(names, state.names)
        if rows is None:
            return
        state.short, state.long = carried(state.short, rows, np.nan), carried(state.long, rows, np.nan)
        state.first, state.since = carried(state.first, rows, step), carried(state.since, rows, -1)
        state.names = names
