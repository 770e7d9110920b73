"""`halt`: stop the run at the end of this boundary."""

from __future__ import annotations

from typing import Any

from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext


class Halt:
    """Sets `context.halt_reason`; the core raises `Halted` with it. Parameter: `reason`."""

    name = "halt"

    def __init__(self, context: ActionContext) -> None:
        self._context = context

    def unavailable(self) -> str | None:
        """Always possible."""
        return None

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`."""
        reason = str(params.get("reason") or "asked for by the policy")
        self._context.halt_reason = reason
        return Applied(step=step, params=params, expected={"reason": reason})

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the stop is still due."""
        due = self._context.halt_reason
        return ReadBack(ok=due == applied.expected["reason"], observed={"reason": due})

    def revert(self, applied: Applied) -> None:
        """Withdraw it, as long as the boundary has not ended."""
        if self._context.halt_reason == applied.expected["reason"]:
            self._context.halt_reason = None
