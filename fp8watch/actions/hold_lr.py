"""`hold_lr`: lower the LR for a while, by a factor or to a ceiling."""

from __future__ import annotations

from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied
from fp8watch.actions.lr_actions import LrAction
from fp8watch.actions.lr_rules import Hold
from fp8watch.actions.undo import Undo, all_or_nothing
from fp8watch.errors import ActionError


class HoldLr(LrAction):
    """LR times `factor`, and at most `to_lr`, for `steps` updates, then back to the schedule over `restore_steps`.

    `to_lr` is the ceiling of the parameter group with the largest base LR; other groups get it in proportion to their
    base LRs. It is compared with the schedule at every step: after a jump of the scheduler the LR is held at the level
    before the jump until the schedule returns to it, even if a rollback makes it jump again. Without `steps` it holds
    until reverted.
    """

    name = "hold_lr"

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        if params.get("factor") is None and params.get("to_lr") is None:
            raise ActionError("hold_lr needs factor or to_lr")
        given = {key: value for key, value in params.items() if value is not None}
        factor = read.number(given, "factor", 1.0, at_least=0.0, at_most=1.0)
        ceilings = None
        expected: dict[str, Any] = {"factor": factor}
        if "to_lr" in given:
            to_lr = read.number(given, "to_lr", at_least=0.0)
            ceilings = [to_lr * weight for weight in self._control.group_weights()]
            expected["to_lr"] = to_lr
        rule = Hold(
            begin=self._control.updates,
            steps=read.whole(given, "steps", at_least=1) if "steps" in given else None,
            factor=factor,
            ceilings=ceilings,
            restore_steps=read.whole(given, "restore_steps", 0),
        )
        return self._add_rule(step, params, rule, undo, replaces=False, **expected)

    def revert(self, applied: Applied) -> None:
        """Release the LR: over `restore_steps` if given, else at once."""
        rule = self._control.rules.get(applied.expected["rule"])
        if isinstance(rule, Hold) and rule.restore_steps:
            rule.release(self._control.updates)
        else:
            super().revert(applied)

    def _is_in_force(self, key: str) -> bool:
        rule = self._control.rules.get(key)
        return rule is not None and not (isinstance(rule, Hold) and rule.is_released)
