"""How many actions have been taken and how many may still be. Only applied actions count, not refused or failed
ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fp8watch.policy.schema import Budgets

DAY_SECONDS = 86_400.0
WINDOW_STEPS = 1000
FREE = frozenset({"halt", "skip_update", "checkpoint_now", "checkpoint_cadence"})
"""Actions that cost nothing: halting is what remains when budgets are spent, skipped updates are bounded by their own
rung, and saving a checkpoint changes no number of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The actions applied so far."""

    actions: tuple[int, ...] = ()
    """`View.seen` at each action within the window."""
    rollbacks: tuple[float, ...] = ()
    """Unix time of each rollback of the last 24 hours."""
    per_checkpoint: Mapping[str, int] = field(default_factory=dict)

    def after(self, action: str, *, seen: int, time_unix: float, checkpoint: str | None = None) -> Spent:
        """The same with one more action."""
        if action in FREE:
            return self
        actions = (*(at for at in self.actions if at > seen - WINDOW_STEPS), seen)
        if action != "rollback":
            return replace(self, actions=actions)
        times = (*(at for at in self.rollbacks if at > time_unix - DAY_SECONDS), time_unix)
        counts = dict(self.per_checkpoint)
        if checkpoint is not None:
            counts[checkpoint] = counts.get(checkpoint, 0) + 1
        return replace(self, actions=actions, rollbacks=times, per_checkpoint=counts)


def refusal(budgets: Budgets, spent: Spent, action: str, *, seen: int, time_unix: float) -> str | None:
    """Why the budgets do not allow this action now; None: they allow it."""
    if action in FREE:
        return None
    actions = sum(at > seen - WINDOW_STEPS for at in spent.actions)
    if actions >= budgets.actions_per_1000_steps:
        return f"budget spent: {actions} of {budgets.actions_per_1000_steps} actions in {WINDOW_STEPS} steps"
    if action == "rollback":
        rollbacks = sum(at > time_unix - DAY_SECONDS for at in spent.rollbacks)
        if rollbacks >= budgets.rollbacks_per_24h:
            return f"budget spent: {rollbacks} of {budgets.rollbacks_per_24h} rollbacks in 24 hours"
    return None
