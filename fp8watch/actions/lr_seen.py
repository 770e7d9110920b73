"""What a scheduler has set so far: how its warm-up is known where it cannot be asked for LRs of other steps.

A schedule that has risen at every position since its first is warming up; the first position at which it rises no
more ends the warm-up. That is enough for `lengthen_warmup`, which walks the schedule more slowly and so asks only for
LRs that were seen already. Positions are the scheduler's (`last_epoch`), so that a rollback, which winds them back,
finds what was seen there before.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch

from fp8watch.actions.lr_rules import Lr

Values = tuple[float, ...]
"""One LR for each parameter group."""

LEAST_RISES = 8
"""Rises in a row, from the beginning on, that make a warm-up."""
MAX_POSITIONS = 200_000
"""Positions that are kept (some 20 MB): nothing is learnt beyond."""
_RISE = 1e-9
"""Relative rise from one position to the next that counts as one, as in `fp8watch.actions.lr_curve`."""


class SeenCurve:
    """LRs of one scheduler by position, as the optimizer steps made them known. Cheap: called at each step."""

    def __init__(self) -> None:
        self.unavailable: str | None = None
        """Why nothing can be learnt; None: it can."""
        self.warmup_steps: int | None = None
        """Position at which the LR stopped rising; None: not known yet. 0: there is no warm-up."""
        self.is_needed = False
        """Whether a rule walks the schedule, so that it is kept on being noted after its warm-up."""
        self._positions: list[int] = []
        self._values: list[Values] = []

    @property
    def is_rising(self) -> bool:
        """Whether the warm-up is under way: the LR has risen from the beginning on, and its end is not known."""
        is_learning = self.unavailable is None and self.warmup_steps is None
        return is_learning and len(self._positions) > LEAST_RISES

    def why_not(self) -> str | None:
        """Why there is no warm-up under way; None: there is."""
        if self.unavailable is not None:
            return self.unavailable
        if self.warmup_steps == 0:
            return "the learning rate has not risen from the beginning on"
        if self.warmup_steps is not None:
            return f"the warm-up ended at step {self.warmup_steps}; rewarm or hold_lr instead"
        if not self.is_rising:
            return f"whether it warms up is known once {LEAST_RISES} learning rates have risen in a row"
        return None

    def note(self, position: int | None, lrs: list[Lr]) -> None:
        """What the schedule has set for the update about to be made."""
        if self.unavailable is not None or position is None:
            return
        if self.warmup_steps is not None and not self.is_needed:
            return
        if self._positions and position <= self._positions[-1]:
            return
        if any(isinstance(lr, torch.Tensor) and lr.device.type != "cpu" for lr in lrs):
            self._end("the learning rate lies on a device, where it is not read at every step")
        elif not self._positions and position > 1:
            self._end(f"the schedule stood at {position} when it was first seen, so how it began is not known")
        elif len(self._positions) >= MAX_POSITIONS:
            self._end(f"the schedule is longer than {MAX_POSITIONS} steps")
        else:
            self._add(position, tuple(float(lr) for lr in lrs))

    def _add(self, position: int, values: Values) -> None:
        if self.warmup_steps is None and self._values and not max(values) > max(self._values[-1]) * (1 + _RISE):
            rises = len(self._values) - 1
            self.warmup_steps = self._positions[-1] if rises >= LEAST_RISES else 0
        self._positions.append(position)
        self._values.append(values)

    def _end(self, why: str) -> None:
        self.unavailable = why

    def between(self, position: float) -> Values | None:
        """The LRs at any position, linear between those that were seen; None where none was seen on either side."""
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
    """The schedule walked at 1/s of its speed: LR(t) = schedule(t0 + (t - t0) / s) until both meet."""

    def __init__(self, curve: SeenCurve, *, start: int, stretch: float) -> None:
        self._curve, self._start, self._stretch = curve, start, stretch
        self.meets_at: int | None = None
        """Position at which both met; None: not yet."""
        curve.is_needed = True

    def __repr__(self) -> str:
        """Tells settings apart, as the representation of any rule does."""
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
