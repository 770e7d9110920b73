"""A person's verdict on an action, signed by the command line and verified by the controller.

The signature covers the action as the person saw it (run, start, attempt, ID, action, parameters, step of the decision,
last step), and the verdict, the person and the time. A verdict counts only while exactly that action waits, so it
cannot be used twice, nor for another action with the same ID. The time is for the log only and is not checked, because
the clocks of two hosts differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from fp8watch.controller.stores.base import Approval
from fp8watch.records import ActionRecord
from fp8watch.security.canonical import is_signed, signed
from fp8watch.security.keyring import KeyRing

NOT_SIGNED = "not signed by a command line"
ANOTHER = "given for another action of this id"
_encoder = msgspec.msgpack.Encoder(order="sorted")


def give(
    action: ActionRecord, verdict: Literal["approve", "refuse"], *, by: str, time_unix: float, ring: KeyRing | None
) -> Approval:
    """Used by the command line: a verdict on this action. Without a ring it is not signed."""
    approval = Approval(verdict=verdict, by=by, time_unix=time_unix, **_content(action))
    return approval if ring is None else signed(approval, ring)


def refusal(approval: Approval, action: ActionRecord, ring: KeyRing | None) -> str:
    """Used by the controller: why a verdict does not count for a waiting action; empty: it counts.

    Without a ring every verdict in the store is trusted, as in a file of one user.
    """
    if ring is not None and not is_signed(approval, ring):
        return NOT_SIGNED
    if ring is None and not approval.action:  # recorded by an earlier version
        return ""
    wanted = _content(action)
    given = {name: getattr(approval, name) for name in wanted}
    content = _encoded(wanted)
    return "" if content is not None and _encoded(given) == content else ANOTHER


def sort(
    approvals: list[Approval], waiting: Mapping[str, ActionRecord], ring: KeyRing | None, refused: set[bytes]
) -> tuple[list[Approval], list[str]]:
    """The verdicts that count for the actions in `waiting` (by ID), and the reasons of newly refused ones.

    A verdict stays in the store at least as long as its action waits, and is checked twice a second. `refused` is
    changed here: it holds the verdicts refused by the last check, so that each refusal is reported once.
    """
    genuine, bad = [], {}
    for item in approvals:
        action = waiting.get(item.action_id)
        if action is not None:
            reason = refusal(item, action, ring)
        else:
            reason = NOT_SIGNED if ring is not None and not is_signed(item, ring) else ""
        if reason:
            bad[msgspec.msgpack.encode(item)] = f"{item.action_id}: {reason}"
        elif action is not None:
            genuine.append(item)
    new = [reason for key, reason in bad.items() if key not in refused]
    refused.clear()
    refused.update(bad)
    return genuine, new


def _encoded(content: dict[str, Any]) -> bytes | None:
    try:
        return _encoder.encode(content)
    except (TypeError, ValueError, RecursionError):  # an unsigned verdict may hold anything
        return None


def _content(action: ActionRecord) -> dict[str, Any]:
    """What a verdict is about, under the names of `Approval`'s fields."""
    return {
        "run": action.run, "action_id": action.id, "start": action.start, "attempt": action.attempt,
        "action": action.action, "params": msgspec.to_builtins(action.params), "decided_step": action.decided_step,
        "last_step": action.expires_step,
    }  # fmt: skip
