"""Base of the three LR actions: each adds one rule to `LrControl` and reads it back from the last optimizer step."""

from __future__ import annotations

import itertools
import math
from typing import Any

from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.lr_rules import LrRule
from fp8watch.actions.undo import Undo
from fp8watch.errors import ActionError

_keys = itertools.count(1)


class LrAction:
    """Base of `lengthen_warmup`, `rewarm` and `hold_lr`."""

    name = ""

    def __init__(self, context: ActionContext) -> None:
        self._context = context
        self._control = context.lr

    def unavailable(self) -> str | None:
        """See `Action`."""
        return self._control.unavailable()

    def _add_rule(
        self, step: int, params: dict[str, Any], rule: LrRule, undo: Undo, *, replaces: bool, **expected: Any
    ) -> Applied:
        if reason := self._control.unavailable():
            raise ActionError(reason)
        scheduled, before = self._control.scheduled_lr(), self._control.rules
        undo.add("the rules of the learning rate", lambda: self._control.restore(before))
        if replaces:
            for key in [key for key in self._control.rules if key.startswith(f"{self.name}:")]:
                self._control.remove(key)
        key = f"{self.name}:{next(_keys)}"
        self._control.add(key, rule)
        return Applied(
            step=step,
            params=params,
            before={"learning_rate": max(scheduled)},
            expected={"rule": key, "after_update": self._control.updates, **expected},
        )

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the last optimizer step used the LR that the rules require."""
        control = self._control
        if applied.expected["rule"] not in control.rules:
            return ReadBack(ok=False, detail="the LR rule is no longer in force")
        if control.updates <= applied.expected["after_update"] or not control.scheduled:
            return ReadBack(ok=None, detail="no optimizer step has been seen since")
        scheduled = [float(lr) for lr in control.scheduled]
        effective = [float(lr) for lr in control.effective]
        demanded = control.demanded()
        observed = {
            "learning_rate": max(effective),
            "scheduled": max(scheduled),
            "factor": max(effective) / max(scheduled) if max(scheduled) else 1.0,
        }
        if control.is_disturbed:
            return ReadBack(ok=False, observed=observed, detail="something else set the LR during the step")
        if not all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(effective, demanded, strict=True)):
            return ReadBack(
                ok=False,
                observed=observed,
                detail=f"the optimizer used {max(effective):g}, {max(demanded):g} was asked for",
            )
        return ReadBack(ok=True, observed=observed)

    def revert(self, applied: Applied) -> None:
        """Remove the rule, unless it has ended or was replaced."""
        self._control.remove(applied.expected["rule"])

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether the rule is gone, or is being released."""
        is_gone = not self._is_in_force(applied.expected["rule"])
        observed = {"learning_rate": max(self._control.scheduled_lr())}
        return ReadBack(ok=is_gone, observed=observed, detail="" if is_gone else "the LR rule is still in force")

    def _is_in_force(self, key: str) -> bool:
        return key in self._control.rules
