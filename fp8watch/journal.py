"""What a controller decided and what it was told, in order: the two records that make a run's decisions replayable.

Beside `fp8watch.records`, where everybody takes them from.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True, tag="trace"):
    """One line of the decision log: what was found, weighed, held back, ordered, answered or concluded, and why.

    Lines are only ever added. All of a line follows from what the controller was told (`Arrival`, `StepFrame`), so
    that a replay writes the same bytes.
    """

    run: str
    attempt: int
    step: int
    time_unix: float
    """Of the message that brought it about, by the clock of the rank that sent it."""
    event: Literal[
        "policy", "found", "held_back", "passed_over", "proposed", "waiting", "person", "ordered", "concluded",
        "outcome", "undoing", "undone", "checkpoint", "attempt",
    ]  # fmt: skip
    incident: str = ""
    finding: str = ""
    rule: str = ""
    action_id: str = ""
    action: str = ""
    reason: str = ""
    details: dict[str, Any] = {}


class Arrival(msgspec.Struct, frozen=True, kw_only=True, tag="arrival"):
    """Something other than a frame that the controller was told, in its place: with the frames all a replay needs."""

    run: str
    sequence: int
    """Grows with everything that arrives, frames (`StepFrame.arrival`) included; the process's number is in its upper
    bits, so that it grows over restarts too."""
    kind: Literal[
        "opened", "hello", "layout", "checkpoint", "result", "evaluation", "goodbye", "lost", "late", "disarmed",
        "approval", "taken_over", "layouts",
    ]  # fmt: skip
    """`opened`: a controller process met the run (again); `step` is the last one that the store knew of. In a cluster:
    `taken_over`: another controller goes on with the memory of the last one; `layouts`: one without such a memory took
    over the attempt's layouts from the store."""
    body: bytes = b""
    """The message as it travelled (`fp8watch.wire.pack`). Empty: `key` names what the store holds."""
    key: str = ""
    """Layouts: `attempt/rank/layout_id`. Lost, late (not waited for any more): the rank. Disarmed: why, empty when
    armed again. Opened: `max_mode`."""
    step: int = 0
    after: str = ""
    """In a cluster: the newest entry of the run's stream that was dealt with before, nodes' frames among them."""
    term: int = 0
    """Opened, taken over: that of the lease under which the controller decides (0: none)."""
