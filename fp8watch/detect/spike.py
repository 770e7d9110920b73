"""The rule that loss and gradient norm share: points far above their own robust baseline.

z = (x - centre) / noise, where x is the loss itself or the logarithm of the norm, and noise is the largest of the
baseline's two noises and a floor. A point above `HOT` sigma is hot and is kept out of the baseline. A run of hot points
is judged by its length and height (`SpikeRule`). A level that stays hot becomes the new baseline after `REBASE_AFTER`
points, so that a run that settles elsewhere is watched again; until then the incident stays open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from fp8watch.detect.baseline import Baseline

HOT = 4.0
"""Sigma above which a point is not ordinary."""
MIN_POINTS = 24
"""Accepted points needed before anything is judged."""
REBASE_AFTER = 256
"""Hot points in a row after which the level is accepted."""
NOISE_POINTS = 2
"""Points of a hot run that enter the tail noise: the rest of a long run is an event, not noise."""
COLD_POINTS = 5
"""Ordinary points in a row that end a hot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeRule:
    """What makes a hot run a warning or a case to act."""

    floor: float
    """Smallest noise that is believed, in units of x, or as a share of the centre where `is_linear`."""
    warn_sigma: float
    act_sigma: float
    act_points: int
    """Hot points needed to act: an outlier that heals at once does not reach this."""
    act_rise: float
    """Rise in x that must be exceeded as well to act."""
    sparse_stride: int = 25
    """Steps between points from which a single point stands for a stretch of training."""
    sparse_rise: float = 0.25
    """Relative rise at which one such point is enough to act."""
    is_linear: bool = False
    """x is the value as logged and not its logarithm; the floor is then relative to the centre."""


class SpikeState(msgspec.Struct):
    """Baseline and the current hot run."""

    baseline: Baseline = msgspec.field(default_factory=Baseline)
    stride: int = 1
    last_step: int | None = None
    run_steps: list[int] = []
    run_values: list[float] = []
    cold: int = 0
    is_act: bool = False
    foot: list[int] = []
    """Steps of the points in a row above half of `HOT` before the run: the foot of a slow rise is the onset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One point compared with the baseline."""

    z: float
    rise: float
    """x - centre."""
    severity: str | None
    onset_step: int
    num_hot: int


def judge(state: SpikeState, rule: SpikeRule, step: int, value: float) -> Judged:
    """Add one finite value to the state, in place, and judge it."""
    if state.last_step is not None and step > state.last_step:
        state.stride = step - state.last_step
    state.last_step = step
    baseline = state.baseline
    if len(baseline) < MIN_POINTS:
        return _unjudged(baseline, step, value)
    floor = rule.floor * abs(baseline.centre) if rule.is_linear else rule.floor
    sigma = max(baseline.tail_noise(), floor, 1e-12)
    rise = value - baseline.centre
    if rise > HOT / 2 * sigma:
        # The trend noise is expensive, and only above this level can it change the verdict.
        noise = baseline.noise()
        if not math.isfinite(noise):
            return _unjudged(baseline, step, value)
        sigma = max(noise, sigma)
    z = rise / sigma
    if len(state.run_steps) < NOISE_POINTS or z <= HOT:
        baseline.add_excess(rise)
    if z <= HOT:
        return _ordinary(state, step, value, z, rise)
    state.cold = 0
    state.run_steps.append(step)
    state.run_values.append(value)
    if len(state.run_steps) >= REBASE_AFTER:
        return _rebase(state, z, rise)
    onset = min(state.foot[0], state.run_steps[0]) if state.foot else state.run_steps[0]
    relative = rise / max(abs(baseline.centre), 1e-12) if rule.is_linear else math.expm1(min(rise, 700.0))
    severity = _severity(state, rule, sigma, relative)
    return Judged(z=z, rise=rise, severity=severity, onset_step=onset, num_hot=len(state.run_steps))


def _unjudged(baseline: Baseline, step: int, value: float) -> Judged:
    if len(baseline) >= MIN_POINTS // 3:
        baseline.add_excess(value - baseline.centre)
    baseline.accept(step, value)
    return Judged(z=0.0, rise=0.0, severity=None, onset_step=step, num_hot=0)


def _severity(state: SpikeState, rule: SpikeRule, sigma: float, relative: float) -> str | None:
    peak = max(value - state.baseline.centre for value in state.run_values)
    is_high = peak > rule.act_sigma * sigma and peak > rule.act_rise
    is_long = len(state.run_values) >= rule.act_points
    is_sparse = state.stride >= rule.sparse_stride and relative > rule.sparse_rise
    if state.is_act or (is_high and (is_long or is_sparse)):
        state.is_act = True
        return "act"
    return "warn" if peak > rule.warn_sigma * sigma and peak > rule.act_rise / 2 else None


def _ordinary(state: SpikeState, step: int, value: float, z: float, rise: float) -> Judged:
    if z > HOT / 2:
        state.foot.append(step)
    elif not state.run_steps:
        state.foot = []
    if state.run_steps:
        state.cold += 1
        if state.cold >= COLD_POINTS:
            state.run_steps, state.run_values, state.cold, state.is_act, state.foot = [], [], 0, False, []
    state.baseline.accept(step, value)
    return Judged(z=z, rise=rise, severity=None, onset_step=step, num_hot=len(state.run_steps))


def _rebase(state: SpikeState, z: float, rise: float) -> Judged:
    fresh = Baseline()
    for step, value in zip(state.run_steps[-64:], state.run_values[-64:], strict=True):
        fresh.accept(step, value)
    onset = state.run_steps[0]
    state.baseline, state.run_steps, state.run_values, state.is_act, state.foot = fresh, [], [], False, []
    return Judged(z=z, rise=rise, severity=None, onset_step=onset, num_hot=0)


def cut(state: SpikeState, step: int) -> SpikeState:
    """Roll back to `step`: the baseline as it was then, and no current run."""
    state.baseline.cut(step)
    state.run_steps, state.run_values, state.cold, state.is_act, state.foot = [], [], 0, False, []
    state.last_step = None
    return state
