"""`skip_update`: skip optimizer updates whose gradients are not finite."""

from __future__ import annotations

from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.in_force import InForce
from fp8watch.actions.undo import Undo, all_or_nothing
from fp8watch.errors import ActionError


class SkipUpdate:
    """Arms the guard. Parameter: `max_consecutive`, the most updates skipped in a row; the next one goes through."""

    name = "skip_update"

    def __init__(self, context: ActionContext) -> None:
        self._guard = context.skip
        self._limits: InForce[int] = InForce()
        """`max_consecutive` of the actions that have armed the guard: the latest applies."""
        self._policys_own = self._guard.max_in_a_row

    def unavailable(self) -> str | None:
        """See `Action`."""
        return self._guard.unavailable()

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        if reason := self.unavailable():
            raise ActionError(reason)
        if not self._limits:
            self._policys_own = self._guard.max_in_a_row
        limit = read.whole(params, "max_consecutive", self._guard.max_in_a_row, at_least=1)
        before = {"max_consecutive": self._guard.max_in_a_row, "was_armed": self._guard.is_armed}
        reasons, most = self._guard.reasons, self._guard.max_in_a_row
        undo.add("the limit of skipped updates", lambda: setattr(self._guard, "max_in_a_row", most))
        undo.add("the reasons to skip updates", lambda: self._keep(reasons))
        undo.add("the limits in force", self._limits.restorer())
        number = self._limits.add(limit)
        self._guard.max_in_a_row = limit
        self._guard.arm(self._reason(number))
        return Applied(
            step=step,
            params=params,
            before=before,
            expected={"max_consecutive": limit, "number": number, "after_question": self._guard.consulted},
        )

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the guard is armed, and the optimizer's wrapper has called it since; without calls it has no
        effect."""
        observed = {"armed": self._guard.is_armed, "skipped_total": float(self._guard.total)}
        if not self._guard.is_armed or self._guard.max_in_a_row != applied.expected["max_consecutive"]:
            return ReadBack(ok=False, observed=observed, detail="the guard is not armed as asked")
        if self._guard.failure is not None:
            return ReadBack(ok=False, observed=observed, detail=f"the guard failed: {self._guard.failure}")
        if self._guard.consulted <= applied.expected["after_question"]:
            return ReadBack(ok=None, observed=observed, detail="no optimizer step has asked it since")
        return ReadBack(ok=True, observed=observed)

    def revert(self, applied: Applied) -> None:
        """Drop this reason to guard. Those of other actions and of the policy remain, with the latest limit."""
        number = applied.expected["number"]
        if self._limits.remove(number):
            self._guard.disarm(self._reason(number))
            self._guard.max_in_a_row = self._limits.latest(self._policys_own)

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether the guard no longer has this reason."""
        is_gone = self._reason(applied.expected["number"]) not in self._guard.reasons
        observed = {"armed": self._guard.is_armed}
        return ReadBack(ok=is_gone, observed=observed, detail="" if is_gone else "the guard is still armed for it")

    def _keep(self, reasons: frozenset[str]) -> None:
        for reason in self._guard.reasons - reasons:
            self._guard.disarm(reason)

    def _reason(self, number: int) -> str:
        return f"{self.name}:{number}"
