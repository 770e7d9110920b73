"""An update many times its usual size from an ordinary gradient at an ordinary rate: the optimizer's state has changed.

An update is the learning rate times a function of gradient and state. u = RMS(update) / learning rate takes the rate
out. When the norm of the gradient that the optimizer got is ordinary too, only the state can have made u leap: second
moments that were lost or restored wrongly, a step counter that started again. u is very even: in emulated runs of a
small GPT its logarithm has a noise of 0.02 to 0.2. In one step it grew by at most 2.7x under any other fault, and by 22
to 24x where the second moments were lost, so `LEAP`x within one observation is far from either.
Updates of less than `LEAST` of the parameters' own size do not count: parameters in BF16 at a low rate move in jumps, a
last bit here and there. A burst of the gradient does not count either: the leap of its own step is the gradient's, and
later updates are compared with it.
The leap is a warning at once, and a case to act once it has an effect: within `FELT_WITHIN` steps the next update is
still `LASTS`x the ordinary one, or the loss leaves its range by `FELT_SIGMA` times its noise. (Optimizers that move the
parameters to an average now and then leap in one step and do no harm.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from fp8watch.detect.baseline import Baseline

MIN_POINTS = 8
"""Ordinary updates needed before anything is judged."""
LEAP = 8.0
BEFORE = 3.0
"""Largest size of the update before the leap, as a factor of the ordinary u."""
GRADIENT = 2.0
"""Largest gradient norm that is ordinary, as a factor of its centre."""
LEAST = 1e-3
"""Smallest RMS of the update over RMS of the parameters that is judged; this is the usual value."""
LASTS = 3.0
FELT_WITHIN = 16
FELT_SIGMA = 5.0
FORGET_AFTER = 64
"""Observations after which a size that persists is the ordinary one."""
LOSS_FLOOR = 0.015
"""Smallest noise of the loss that is believed, as a share of the loss (as in `loss_spike`)."""


class MomentsState(msgspec.Struct):
    """Baselines of update, gradient and loss, and the current leap."""

    updates: Baseline = msgspec.field(default_factory=Baseline)
    """log u."""
    norms: Baseline = msgspec.field(default_factory=Baseline)
    """log of the gradient norm after clipping."""
    losses: Baseline = msgspec.field(default_factory=Baseline)
    before: float = 0.0
    """log u minus its centre, at the newest observation."""
    num_out: int = 0
    """Observations in a row that were not ordinary."""
    onset: int = -1
    leap: float = 0.0
    gradient: float = 0.0
    is_felt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leap:
    """A leap of the update that is under way."""

    onset_step: int
    times: float
    """u over its ordinary size, at the onset."""
    gradient_times: float
    """The gradient norm over its ordinary size, at the onset."""
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
    """Add one step to the state, in place, and return the current leap, if any.

    Numbers are positive and finite; None: not observed. `ratio`: RMS of the update over RMS of the parameters.
    """
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
    """Roll back to `step`: forget later points and the current leap."""
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
