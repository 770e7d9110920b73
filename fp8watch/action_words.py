"""What became of an action, in plain words: the same in listings, stories, the demo and the console.

Records keep their own, shorter names (`status`, `readback`, `outcome`) for programs. An action that was never done has
nothing to read back and no outcome.
"""

from __future__ import annotations

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
_EFFECTS = {"helped": "helped", "no_effect": "no effect", "reverted": "undone", "pending": "being judged"}


def is_done(action: ActionRecord) -> bool:
    """Whether the ranks have carried it out."""
    return action.status in {"applied", "reverted"} or action.applied_step is not None


def state(action: ActionRecord) -> str:
    """How far it got, and who approved or refused it."""
    by = action.answered_by
    if action.status == "waiting":
        return "waiting" if action.expires_step is None else f"waiting until step {action.expires_step}"
    if action.status == "refused" and by:
        return f"refused by {by}"
    words = _STATES.get(action.status, action.status)
    if action.status == "applied" and action.readback == "failed":
        words = "done, but not in force"
    return f"{words}, approved by {by}" if by and action.status != "expired" else words


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
