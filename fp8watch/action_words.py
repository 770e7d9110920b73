"""What became of an action, in plain words: the same in listings, stories, the demo and the console.

Records keep their own, shorter names (`status`, `readback`, `outcome`) for programs. An action that was never done has
nothing to read back and no outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8watch.records import ActionRecord

_STATES = {
    "proposed": "only proposed",
    "refused": "not allowed",
    "sent": "ordered",
    "applied": "done",
    "failed": "failed",
    "vetoed": "vetoed by a rank",
    "expired": "too late",
    "unavailable": "passed over",
    "reverted": "done and undone",
}
NOBODY_ANSWERED = "nobody answered"
"""How the reason of a question begins that has expired."""
_EFFECTS = {"helped": "helped", "no_effect": "no effect", "reverted": "undone", "pending": "being judged"}


def named(action: str, params: Mapping[str, Any]) -> str:
    """An action with what it was asked to do: `rollback (checkpoint step-000120, skip_batches 200)`. Empty lists and
    mappings say nothing and are left out."""
    given = {name: value for name, value in params.items() if not (isinstance(value, list | dict) and not value)}
    shown = parameters(given)
    return f"{action} ({shown})" if shown else action


def parameters(values: Mapping[str, Any], limit: int = 4) -> str:
    """`name 3` for plain values, `3 names` for lists and mappings."""
    parts = []
    for name, value in list(values.items())[:limit]:
        if isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        elif isinstance(value, list | dict):
            parts.append(_only(name, value) if len(value) == 1 else f"{len(value)} {name}")
        elif value is not None:
            parts.append(f"{name} {value}")
    if len(values) > limit:
        parts.append("...")
    return ", ".join(parts)


def _only(name: str, values: list[Any] | dict[str, Any]) -> str:
    first = next(iter(values))
    return f"{name} {first.get('action', len(first))}" if isinstance(first, dict) else str(first)


def is_done(action: ActionRecord) -> bool:
    """Whether the ranks have carried it out."""
    return action.status in {"applied", "reverted"} or action.applied_step is not None


def state(action: ActionRecord, now: int | None = None) -> str:
    """How far it got, and who approved or refused it; `now`: the run's step, for what a waiting rollback would cost."""
    by = action.answered_by
    if action.status == "waiting":
        until = "waiting" if action.expires_step is None else f"waiting until step {action.expires_step}"
        return until + _would_be_lost(action, now)
    if action.status == "expired" and not by and action.expires_step is not None:
        return f"expired, {NOBODY_ANSWERED}" if NOBODY_ANSWERED in action.reason else "question withdrawn"
    if action.status == "refused" and by:
        return f"refused by {by}"
    words = _STATES.get(action.status, action.status)
    if action.status == "applied" and action.readback == "failed":
        words = "done, but not in force"
    return f"{words}, approved by {by}" if by and action.status != "expired" else words


def _would_be_lost(action: ActionRecord, now: int | None) -> str:
    target = action.params.get("checkpoint_step")
    if now is None or action.action != "rollback" or not isinstance(target, int) or now <= target:
        return ""
    steps = now - target
    return f" ({steps} {'step' if steps == 1 else 'steps'} would be lost now)"


def read_back(action: ActionRecord) -> str:
    """The result of reading it back; empty when there is nothing to read back."""
    if not is_done(action):
        return ""
    return {"ok": "ok", "failed": "failed", "pending": "not yet"}[action.readback]


def effect(action: ActionRecord) -> str:
    """Whether it helped; empty for an action that was never done."""
    if not is_done(action):
        return ""
    if action.outcome == "pending" and action.settle_until is not None:
        return f"judged at step {action.settle_until}"
    return _EFFECTS.get(action.outcome, action.outcome)


def brief(action: ActionRecord) -> str:
    """Name, state and effect in one line of a list: `bf16_all done, helped`."""
    parts = [f"{action.action} {state(action)}", effect(action)]
    return ", ".join(part for part in parts if part)
