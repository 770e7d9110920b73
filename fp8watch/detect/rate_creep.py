"""A learning rate that climbs, step by step, beyond everything its schedule had settled at.

A jump shows in the step itself (`update_rms`), but a rate that grows by a few percent per step never jumps. A warm-up
climbs too; the difference is that this schedule had settled before: no rise for `SETTLED` points in a row (constant, or
decaying). A warm restart returns to a level already seen. A rate beyond `PAST`x the largest settled one has no
precedent. Once the updates have grown with it, that is a warning. It is a case to act when the loss has suffered: the
median of its newest `RECENT` points is more than `SIGMAS` standard errors above its settled level, in the run's own
noise. A rate that someone raises, and with which the run trains as before, stays a warning.
A new level counts as settled after `ACCEPT_AFTER` points without a rise.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import msgspec

from fp8watch.detect.baseline import Baseline

SETTLED = 32
"""Points without a rise after which a schedule has settled."""
PAST = 2.0
"""Factor over the largest settled rate."""
UPDATES = 3.0
"""Factor over the settled RMS of the update."""
RECENT = 16
"""Newest losses that are compared with the settled ones."""
SIGMAS = 4.0
"""In standard errors of the median of `RECENT` losses."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""
ACCEPT_AFTER = 200
"""Points without a rise after which a level beyond `PAST`x counts as settled too."""
SAME = 1e-6
"""Relative difference up to which two rates are the same."""


class CreepState(msgspec.Struct):
    """The rate's settled past, and the updates and losses of that time."""

    last: float = 0.0
    steady: int = 0
    """Points in a row in which the rate did not rise."""
    top: float = 0.0
    """Largest rate since the last rise began, except rates beyond `PAST`x."""
    settled: float = 0.0
    """Largest settled rate; 0: the schedule has not settled yet."""
    since: int = -1
    """First step above the settled rate; -1: it is not above."""
    updates: Baseline = msgspec.field(default_factory=Baseline)
    """log update RMS of settled steps."""
    losses: Baseline = msgspec.field(default_factory=Baseline)
    """Loss of settled steps."""
    recent: list[float] = []
    """Newest losses since the schedule was last settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Creep:
    """A climb without precedent."""

    onset_step: int
    before: float
    """Largest settled rate."""
    follows: bool
    """Whether the updates have grown with it."""
    loss_sigmas: float
    """Standard errors by which the loss is above its settled level; NaN where unknown."""

    @property
    def is_harmful(self) -> bool:
        """Whether this is a case to act."""
        return self.follows and self.loss_sigmas > SIGMAS


def follow(state: CreepState, step: int, rate: float, moved: float | None, loss: float | None) -> Creep | None:
    """Add one step to the state, in place: its rate (finite), update RMS and loss (finite; None: not observed)."""
    is_rise = rate > state.last * (1.0 + SAME)
    if rate <= state.settled * (1.0 + SAME):
        state.since = -1
    elif state.since < 0:
        state.since = step
    state.steady = 0 if is_rise else state.steady + 1
    state.last = rate
    is_new = state.settled > 0 and rate > PAST * state.settled
    if not is_new:
        state.top = rate if is_rise else max(state.top, rate)
    if state.steady >= (ACCEPT_AFTER if is_new else SETTLED):
        state.settled, state.recent = max(state.settled, rate if is_new else state.top), []
        if moved is not None:
            state.updates.accept(step, math.log(moved))
        if loss is not None:
            state.losses.accept(step, loss)
        return None
    if loss is not None:
        state.recent = [*state.recent[1 - RECENT :], loss]
    if not is_new:
        return None
    ordinary = state.updates.centre
    follows = moved is not None and math.isfinite(ordinary) and moved > UPDATES * math.exp(ordinary)
    return Creep(onset_step=state.since, before=state.settled, follows=follows, loss_sigmas=_sigmas(state))


def cut(state: CreepState, step: int) -> None:
    """Roll back to `step`: what had settled before it stays settled."""
    state.updates.cut(step)
    state.losses.cut(step)
    state.recent, state.steady, state.last, state.since, state.top = [], 0, math.inf, -1, 0.0


def _sigmas(state: CreepState) -> float:
    noise = state.losses.noise()
    if len(state.recent) < RECENT or not math.isfinite(noise) or len(state.losses) < SETTLED:
        return math.nan
    error = MEDIAN_ERROR * max(noise, 1e-3 * abs(state.losses.centre)) / math.sqrt(RECENT)
    return (statistics.median(state.recent) - state.losses.centre) / max(error, 1e-12)
