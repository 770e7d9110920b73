"""`rewarm`: a second warm-up after the first one is over."""

from __future__ import annotations

from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied
from fp8watch.actions.lr_actions import LrAction
from fp8watch.actions.lr_rules import Rewarm as RewarmRule
from fp8watch.actions.undo import Undo, all_or_nothing


class Rewarm(LrAction):
    """LR = schedule times a factor that rises linearly from `start_factor` to 1 over `steps` updates."""

    name = "rewarm"

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`. Replaces a rewarm that is still running."""
        steps = read.whole(params, "steps", 100, at_least=1)
        start_factor = read.number(params, "start_factor", 0.1, at_least=0.0, below=1.0)
        rule = RewarmRule(begin=self._control.updates, steps=steps, start_factor=start_factor)
        return self._add_rule(step, params, rule, undo, replaces=True, factor=start_factor, steps=steps)
