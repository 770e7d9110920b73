"""LR rules: what an action does to the learning rate, as a function of the update and the schedule's position.

A rule takes the LR of one parameter group and returns another, or the same object when it changes nothing. LRs are
floats or 0-d tensors; a tensor's value is never read, so that an LR on a device costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Lr = float | torch.Tensor


class LrRule(Protocol):
    """One standing change of the LR."""

    def transform(self, lr: Lr, *, group: int, update: int, position: int | None) -> Lr:
        """The LR of a group for an update.

        `update` counts optimizer updates since the `LrControl` was made (replayed ones too); `position` is the
        scheduler's `last_epoch`, or None without a scheduler.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Follows the schedule at 1/s of its speed: LR(t) = schedule(t0 + (t - t0) / s) until both LRs meet."""

    factors: tuple[tuple[float, ...], ...]
    """`factors[t - start][group]`, from `start` to the point where both LRs meet; 1 afterwards."""
    start: int
    """t0: a position of the scheduler."""

    def transform(self, lr: Lr, *, group: int, update: int, position: int | None) -> Lr:
        """See `LrRule`."""
        if position is None or not 0 <= position - self.start < len(self.factors):
            return lr
        factor = self.factors[position - self.start][group]
        return lr if factor == 1.0 else lr * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarm:
    """Multiplies the LR by a factor that rises linearly from `start_factor` to 1 over `steps` updates."""

    begin: int
    """First update it applies to."""
    steps: int
    start_factor: float

    def transform(self, lr: Lr, *, group: int, update: int, position: int | None) -> Lr:
        """See `LrRule`."""
        done = update - self.begin
        if not 0 <= done < self.steps:
            return lr
        return lr * (self.start_factor + (1.0 - self.start_factor) * done / self.steps)


@dataclass(slots=True, kw_only=True)
class Hold:
    """Applies a factor or a ceiling for `steps` updates, then returns to the schedule: linearly over `restore_steps`,
    or at once.

    A ceiling is released only when the schedule itself is at or below it: an LR that jumped is held down until the
    schedule is normal again, however long that takes. (An LR tensor is never read; there only `steps` counts.)
    """

    begin: int
    steps: int | None
    """None: until reverted."""
    factor: float = 1.0
    ceilings: Sequence[float] | None = None
    """Highest LR of each parameter group; None: only the factor applies."""
    restore_steps: int = 0
    _released_at: int | None = field(default=None, init=False)

    def transform(self, lr: Lr, *, group: int, update: int, position: int | None) -> Lr:
        """See `LrRule`."""
        held = self._held(lr, group)
        end = self._end(lr, group, update)
        if end is None or update < end:
            return held
        done = update - end
        if done >= self.restore_steps:
            return lr
        return held + (lr - held) * ((done + 1) / (self.restore_steps + 1))

    @property
    def is_released(self) -> bool:
        """Whether the return to the schedule has begun."""
        return self._released_at is not None

    def release(self, update: int) -> None:
        """Start the return to the schedule with this update."""
        self.steps = update - self.begin
        self._released_at = update

    def _held(self, lr: Lr, group: int) -> Lr:
        held = lr if self.factor == 1.0 else lr * self.factor
        if self.ceilings is None:
            return held
        ceiling = self.ceilings[group]
        if isinstance(held, torch.Tensor):
            return held.clamp(max=ceiling)
        return held if held <= ceiling else ceiling

    def _end(self, lr: Lr, group: int, update: int) -> int | None:
        """The first update that is no longer held; None while unknown."""
        if self._released_at is not None or self.steps is None:
            return self._released_at
        end = self.begin + self.steps
        if self.ceilings is None or isinstance(lr, torch.Tensor):
            return end
        # The group with the highest ceiling decides for all: a group with LR 0 is always at or below its ceiling.
        ceiling = self.ceilings[group]
        if update >= end and ceiling == max(self.ceilings) and lr <= ceiling * (1 + 1e-9):
            self._released_at = update
        return self._released_at
