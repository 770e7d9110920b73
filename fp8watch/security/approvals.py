"""A person's verdict, signed by the command line and verified by the controller.

It covers the action as the person saw it: run, start, attempt, id, action, parameters, the step of the decision and the
last step, besides verdict, person and time. It counts while exactly that action waits, so that it cannot be used twice,
nor for another action that has got the same id. Its time is for the log and is compared with nothing: the clocks of two
hosts differ.
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
    """The command line's side: a verdict on this action. No ring: unsigned."""
    approval = Approval(verdict=verdict, by=by, time_unix=time_unix, **_content(action))
    return approval if ring is None else signed(approval, ring)


def refusal(approval: Approval, action: ActionRecord, ring: KeyRing | None) -> str:
    """The controller's side: why a verdict does not count for an action that waits; empty: it counts.

    No ring: whoever can write the store is believed, as with a file of one user.
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
    """Those that count for what waits (by id), and why others, which are new, do not.

    A verdict stays in the store while its action waits, and longer, and is looked at twice a second: `refused` (changed
    here) holds what was refused at the last look, so that each is said once.
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
    except (TypeError, ValueError, RecursionError):  # in an unsigned verdict may be anything
        return None


def _content(action: ActionRecord) -> dict[str, Any]:
    """What a verdict is about, by the names of `Approval`'s fields."""
    return {
        "run": action.run, "action_id": action.id, "start": action.start, "attempt": action.attempt,
        "action": action.action, "params": msgspec.to_builtins(action.params), "decided_step": action.decided_step,
        "last_step": action.expires_step,
    }  # fmt: skip
