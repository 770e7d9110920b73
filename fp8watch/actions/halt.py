"""`halt`: stop the run at the end of this boundary."""

from __future__ import annotations

from typing import Any

from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.undo import Undo, all_or_nothing


class Halt:
    """Sets `context.halt_reason`; `Watch.step` raises `Halted` with it. Parameter: `reason`."""

    name = "halt"

    def __init__(self, context: ActionContext) -> None:
        self._context = context

    def unavailable(self) -> str | None:
        """None: always available."""
        return None

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        reason = str(params.get("reason") or "asked for by the policy")
        before = self._context.halt_reason
        undo.add("the pending halt", lambda: setattr(self._context, "halt_reason", before))
        self._context.halt_reason = reason
        return Applied(step=step, params=params, expected={"reason": reason})

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the halt is still pending."""
        pending = self._context.halt_reason
        return ReadBack(ok=pending == applied.expected["reason"], observed={"reason": pending})

    def revert(self, applied: Applied) -> None:
        """Cancel the halt, as long as the boundary has not ended."""
        if self._context.halt_reason == applied.expected["reason"]:
            self._context.halt_reason = None

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether no halt for this reason is pending."""
        pending = self._context.halt_reason
        return ReadBack(ok=pending != applied.expected["reason"], observed={"reason": pending})
