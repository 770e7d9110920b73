"""An update many times its size from an ordinary gradient at an ordinary rate: the optimizer's state is another.

An update is the learning rate times a function of gradient and state. u = RMS(update) / learning rate takes the rate
out; where the norm of the gradient that the optimizer got is ordinary as well, only the state can have made u leap:
second moments that were lost or restored wrongly, a step counter that began anew. u is very even (its logarithm has a
noise of 0.02 to 0.2 in emulated runs of a small GPT; in one step it grew by at most 2.7x in those with any other fault,
and by 22 to 24x where the second moments were lost), so `LEAP`x within one observation is far from either.
Updates of less than `LEAST` of the parameters' own size are too small to be one: parameters in BF16 at a low rate move
in jumps, a last bit here and there.
A gradient that bursts is no such case: the leap of its own step is its own, and what follows is measured against it.
It is said at once, and is a case to act when it was felt: when within `FELT_WITHIN` steps the next update still is
`LASTS`x the ordinary one, or the loss leaves its range by `FELT_SIGMA` of its noise. (Optimizers that move the
parameters to an average now and then leap in one step and do no harm.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from fp8watch.detect.baseline import Baseline

MIN_POINTS = 8
"""Ordinary updates before anything is judged."""
LEAP = 8.0
BEFORE = 3.0
"""Times the ordinary u that the update before the leap may be, at most."""
GRADIENT = 2.0
"""Times the ordinary gradient norm that counts as ordinary."""
LEAST = 1e-3
"""RMS of the update over RMS of the parameters; what is usual."""
LASTS = 3.0
FELT_WITHIN = 16
FELT_SIGMA = 5.0
FORGET_AFTER = 64
"""Observations after which a size that stays is the ordinary one."""
LOSS_FLOOR = 0.015
"""Smallest noise of the loss believed, as a share of it (as in `loss_spike`)."""


class MomentsState(msgspec.Struct):
    """Ordinary updates and gradients, and the leap under way."""

    updates: Baseline = msgspec.field(default_factory=Baseline)
    """log u."""
    norms: Baseline = msgspec.field(default_factory=Baseline)
    """log of the gradient norm after clipping."""
    losses: Baseline = msgspec.field(default_factory=Baseline)
    before: float = 0.0
    """log u over its centre, at the newest observation."""
    num_out: int = 0
    """Observations in a row that were not ordinary."""
    onset: int = -1
    leap: float = 0.0
    gradient: float = 0.0
    is_felt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leap:
    """Of the update."""

    onset_step: int
    times: float
    """u over its ordinary size, at the onset."""
    gradient_times: float
    """The same of the gradient norm."""
    is_felt: bool


def follow(
    state: MomentsState,
    step: int,
    *,
    rate: float,
    moved: float | None,
    ratio: float | None,
    norm: float | None,
    loss: float | None,
) -> Leap | None:
    """Take a step in, in place: positive finite numbers, None: not observed; `ratio`: RMS of the update over that of
    the parameters. The leap under way, if there is one."""
    if state.onset >= 0 and step - state.onset > FELT_WITHIN:
        state.onset, state.is_felt = -1, False
    if state.onset >= 0 and loss is not None:
        state.is_felt = state.is_felt or _is_out(state.losses, loss)
    elif loss is not None:
        state.losses.accept(step, loss)
    if moved is not None and rate > 0:
        is_small = ratio is not None and ratio < LEAST
        _judge(state, step, math.log(moved / rate), norm, is_small=is_small)
    if state.onset < 0:
        return None
    return Leap(onset_step=state.onset, times=state.leap, gradient_times=state.gradient, is_felt=state.is_felt)


def cut(state: MomentsState, step: int) -> None:
    """A rollback to `step`."""
    for baseline in (state.updates, state.norms, state.losses):
        baseline.cut(step)
    state.onset, state.is_felt, state.before, state.num_out = -1, False, 0.0, 0


def _judge(state: MomentsState, step: int, value: float, norm: float | None, *, is_small: bool) -> None:
    rise = value - state.updates.centre if len(state.updates) >= MIN_POINTS else 0.0
    beyond = math.log(norm) - state.norms.centre if norm is not None and len(state.norms) >= MIN_POINTS else math.inf
    if state.onset >= 0:
        state.is_felt = state.is_felt or rise > math.log(LASTS)
    elif rise > math.log(LEAP) and state.before < math.log(BEFORE) and beyond < math.log(GRADIENT) and not is_small:
        state.onset, state.leap, state.gradient, state.is_felt = step, math.exp(rise), math.exp(beyond), False
    state.num_out = 0 if rise < math.log(LASTS) else state.num_out + 1
    if state.num_out == 0 or state.num_out > FORGET_AFTER:
        state.updates.accept(step, value)
    state.before = rise
    if norm is not None and state.onset < 0:
        state.norms.accept(step, math.log(norm))


def _is_out(losses: Baseline, loss: float) -> bool:
    if len(losses) < MIN_POINTS:
        return False
    noise = losses.noise()
    if not math.isfinite(noise):
        return False
    return loss - losses.centre > FELT_SIGMA * max(noise, LOSS_FLOOR * abs(losses.centre))
