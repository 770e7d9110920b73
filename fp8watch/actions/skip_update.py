"""`skip_update`: leave out optimizer updates whose gradients are not finite."""

from __future__ import annotations

from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.errors import ActionError


class SkipUpdate:
    """Arms the guard. Parameter: `max_consecutive` updates in a row, then it lets go."""

    name = "skip_update"

    def __init__(self, context: ActionContext) -> None:
        self._guard = context.skip

    def unavailable(self) -> str | None:
        """See `Action`."""
        return self._guard.unavailable()

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`."""
        if reason := self.unavailable():
            raise ActionError(reason)
        limit = read.whole(params, "max_consecutive", self._guard.max_in_a_row, at_least=1)
        before = {"max_consecutive": self._guard.max_in_a_row, "was_armed": self._guard.is_armed}
        self._guard.max_in_a_row = limit
        self._guard.arm(self.name)
        return Applied(
            step=step,
            params=params,
            before=before,
            expected={"max_consecutive": limit, "after_question": self._guard.consulted},
        )

    def read_back(self, applied: Applied) -> ReadBack:
        """Armed, and asked by the optimizer's wrapper since: a guard that nobody asks guards nothing."""
        observed = {"armed": self._guard.is_armed, "skipped_total": float(self._guard.total)}
        if not self._guard.is_armed or self._guard.max_in_a_row != applied.expected["max_consecutive"]:
            return ReadBack(ok=False, observed=observed, detail="the guard is not armed as asked")
        if self._guard.failure is not None:
            return ReadBack(ok=False, observed=observed, detail=f"the guard failed: {self._guard.failure}")
        if self._guard.consulted <= applied.expected["after_question"]:
            return ReadBack(ok=None, observed=observed, detail="no optimizer step has asked it since")
        return ReadBack(ok=True, observed=observed)

    def revert(self, applied: Applied) -> None:
        """Disarm."""
        self._guard.disarm(self.name)
        self._guard.max_in_a_row = applied.before["max_consecutive"]
