"""`lengthen_warmup`: while the schedule is still warming up, follow it more slowly.

If the schedule can be evaluated at other steps (`fp8watch.actions.lr_curve`), the end of its warm-up is known from the
start. For any other schedule, the LRs seen so far are enough (`fp8watch.actions.lr_seen`), because the slower schedule
needs only positions that the original one has passed.
"""

from __future__ import annotations

from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.lr_actions import LrAction
from fp8watch.actions.lr_curve import LrCurve
from fp8watch.actions.lr_rules import Stretch
from fp8watch.actions.lr_seen import SeenCurve, SeenStretch
from fp8watch.actions.undo import Undo, all_or_nothing
from fp8watch.errors import ActionError

MAX_STEPS = 1_000_000
"""Longest stretched warm-up: one factor per step and group is kept in memory."""


class LengthenWarmup(LrAction):
    """LR(t) = schedule(t0 + (t - t0) / stretch) until both meet. Parameter: `stretch` > 1."""

    name = "lengthen_warmup"

    def __init__(self, context: ActionContext) -> None:
        super().__init__(context)
        self._curve = LrCurve(context.lr_scheduler, context.optimizer)
        self._seen: SeenCurve | None = None
        if self._curve.unavailable is not None and self._control.position is not None:
            self._seen = self._control.seen = SeenCurve()

    @property
    def warmup_steps(self) -> int | None:
        """Position at which the schedule's warm-up ends; None while unknown."""
        return self._curve.warmup_steps if self._seen is None else self._seen.warmup_steps

    @property
    def is_warming_up(self) -> bool:
        """Whether the LR has risen at every step so far, for a schedule that cannot be evaluated at other steps."""
        return self._seen is not None and self._seen.is_rising

    def unavailable(self) -> str | None:
        """See `Action`. Reasons: no scheduler, no knowledge of its warm-up, no warm-up, or one that is over."""
        if self._seen is not None:
            why = super().unavailable() or self._seen.why_not()
            return why if why is None or self._seen.warmup_steps else f"{self._curve.unavailable}; {why}"
        reason = super().unavailable() or self._curve.unavailable
        if reason is not None:
            return reason
        end, position = self._curve.warmup_steps, self._control.position
        if end is None:
            return "the end of the warm-up is not known"
        if end == 0:
            return "the schedule has no warm-up"
        if position is None or position >= end:
            return f"the warm-up ended at step {end}; rewarm or hold_lr instead"
        return None

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        stretch = read.number(params, "stretch", 2.0, above=1.0, at_most=1000.0)
        if reason := self.unavailable():
            raise ActionError(reason)
        start = self._control.position
        assert start is not None
        if self._seen is not None:
            rule = SeenStretch(self._seen, start=start, stretch=stretch)
            return self._add_rule(step, params, rule, undo, replaces=True, start=start)
        factors = self._factors(start, stretch)
        return self._add_rule(
            step,
            params,
            Stretch(start=start, factors=factors),
            undo,
            replaces=True,
            start=start,
            meets_at=start + len(factors),
        )

    def _factors(self, start: int, stretch: float) -> tuple[tuple[float, ...], ...]:
        end = self._curve.warmup_steps
        assert end is not None
        last = int((end - start) * stretch) + 1
        if last > MAX_STEPS:
            raise ActionError(f"the warm-up would take {last} more steps; the limit is {MAX_STEPS}")
        factors: list[tuple[float, ...]] = []
        for ahead in range(last):
            slow, fast = self._curve.between(start + ahead / stretch), self._curve.at(start + ahead)
            if ahead and max(slow) >= max(fast) * (1 - 1e-12):
                break
            factors.append(tuple(a / b if b > 0 else 1.0 for a, b in zip(slow, fast, strict=True)))
        return tuple(factors)

    def read_back(self, applied: Applied) -> ReadBack:
        """As in `LrAction`, but pending at the first step (t0), which has factor 1 and shows nothing."""
        position = self._control.last_position
        has_updated = self._control.updates > applied.expected["after_update"]
        if has_updated and (position is None or position <= applied.expected["start"]):
            return ReadBack(ok=None, detail=f"the schedule is at position {position}, where nothing differs yet")
        return super().read_back(applied)
