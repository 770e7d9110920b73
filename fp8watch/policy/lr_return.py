"""When a learning rate that is held at a level may be let go, and the level to take again when that was too early."""

from __future__ import annotations

from fp8watch.policy.recurrence import MEMORY_STEPS
from fp8watch.policy.state import InForce, PolicyState
from fp8watch.policy.view import View

JUMP = 1.25
"""A scheduled LR of more than this many times its level before has jumped."""


def why_lr_is_kept(held: InForce, view: View) -> str | None:
    """Why a held level is not let go: the schedule is above it. None: it is not, or it is not observed."""
    level = held.params.get("to_lr") if held.action == "hold_lr" else None
    scheduled = view.scheduled_lr()
    if level is None or scheduled is None or scheduled <= level * JUMP:
        return None
    return f"the schedule asks for {scheduled:.3g}: held at {level:.3g} until it is back"


def returned_level(state: PolicyState, view: View) -> float | None:
    """The lowest level at which the LR was held until a recent trial return; None: there was none."""
    levels = [
        item.held.params["to_lr"]
        for item in state.returned
        if item.held.action == "hold_lr" and "to_lr" in item.held.params and view.seen - item.seen <= MEMORY_STEPS
    ]
    return min(levels, default=None)
