"""Recognises the warm-up of a scheduler that cannot be evaluated at other steps, from the LRs that it has set so far.

A schedule that has risen at every position since its first is warming up; the first position without a rise ends the
warm-up. That is enough for `lengthen_warmup`, which follows the schedule more slowly and so needs only LRs that were
already seen. Positions are the scheduler's `last_epoch`. A rollback resets it, but LRs seen before are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch

from fp8watch.actions.lr_curve import RISE, Values
from fp8watch.actions.lr_rules import Lr

LEAST_RISES = 8
"""Consecutive rises, from the first position on, that make a warm-up."""
MAX_POSITIONS = 200_000
"""Most positions that are kept (about 20 MB). For a longer schedule, learning stops."""


class SeenCurve:
    """LRs of one scheduler by position, learnt from the optimizer steps. Cheap: called at every step."""

    def __init__(self) -> None:
        self.unavailable: str | None = None
        """Why nothing can be learnt, or None if it can."""
        self.warmup_steps: int | None = None
        """Position at which the LR stopped rising. None: not known yet. 0: there is no warm-up."""
        self.is_needed = False
        """Whether a rule uses this curve, so that LRs have to be recorded after the warm-up too."""
        self._positions: list[int] = []
        self._values: list[Values] = []

    @property
    def is_rising(self) -> bool:
        """Whether a warm-up is in progress: the LR has risen at every position so far, at least `LEAST_RISES` times."""
        is_learning = self.unavailable is None and self.warmup_steps is None
        return is_learning and len(self._positions) > LEAST_RISES

    def why_not(self) -> str | None:
        """Why no warm-up is in progress, or None if one is."""
        if self.unavailable is not None:
            return self.unavailable
        if self.warmup_steps == 0:
            return "the learning rate has not risen from the start"
        if self.warmup_steps is not None:
            return f"the warm-up ended at step {self.warmup_steps}; rewarm or hold_lr instead"
        if not self.is_rising:
            return f"a warm-up is recognised once the learning rate has risen {LEAST_RISES} times in a row"
        return None

    def note(self, position: int | None, lrs: list[Lr]) -> None:
        """Record the LRs that the scheduler has set for the next update."""
        if self.unavailable is not None or position is None:
            return
        if self.warmup_steps is not None and not self.is_needed:
            return
        if self._positions and position <= self._positions[-1]:
            return
        if any(isinstance(lr, torch.Tensor) and lr.device.type != "cpu" for lr in lrs):
            self._give_up("the learning rate is on a device, where it is not read at every step")
        elif not self._positions and position > 1:
            self._give_up(f"the schedule was already at {position} when first seen, so its beginning is unknown")
        elif len(self._positions) >= MAX_POSITIONS:
            self._give_up(f"the schedule is longer than {MAX_POSITIONS} steps")
        else:
            self._add(position, tuple(float(lr) for lr in lrs))

    def _add(self, position: int, values: Values) -> None:
        if self.warmup_steps is None and self._values and not max(values) > max(self._values[-1]) * (1 + RISE):
            rises = len(self._values) - 1
            self.warmup_steps = self._positions[-1] if rises >= LEAST_RISES else 0
        self._positions.append(position)
        self._values.append(values)

    def _give_up(self, why: str) -> None:
        self.unavailable = why

    def between(self, position: float) -> Values | None:
        """LR of each group at any position, interpolated linearly; None outside of the positions that were seen."""
        above = bisect_left(self._positions, position)
        if above == len(self._positions):
            return None
        if self._positions[above] == position:
            return self._values[above]
        if above == 0:
            return None
        left, right = self._positions[above - 1], self._positions[above]
        share = (position - left) / (right - left)
        pairs = zip(self._values[above - 1], self._values[above], strict=True)
        return tuple(a + (b - a) * share for a, b in pairs)


class SeenStretch:
    """Follows the schedule at 1/s of its speed: LR(t) = schedule(t0 + (t - t0) / s) until both LRs meet."""

    def __init__(self, curve: SeenCurve, *, start: int, stretch: float) -> None:
        self._curve, self._start, self._stretch = curve, start, stretch
        self.meets_at: int | None = None
        """Position at which both LRs met; None: not yet."""
        curve.is_needed = True

    def __repr__(self) -> str:
        """Shows the settings: a rollback compares rules by their representation."""
        return f"SeenStretch(start={self._start}, stretch={self._stretch:g})"

    def transform(self, lr: Lr, *, group: int, update: int, position: int | None) -> Lr:
        """See `LrRule`."""
        if position is None or position <= self._start or (self.meets_at is not None and position >= self.meets_at):
            return lr
        fast = self._curve.between(position)
        slow = self._curve.between(self._start + (position - self._start) / self._stretch)
        if fast is None or slow is None:
            return lr
        if max(slow) >= max(fast) * (1 - 1e-12):
            self.meets_at = position
            self._curve.is_needed = False
            return lr
        factor = slow[group] / fast[group] if fast[group] > 0 else 1.0
        changed: Any = lr * factor
        return lr if factor == 1.0 else changed
