"""What a controller decided and what it was told, in order: the two records that make a run's decisions replayable.

Everybody imports them from `fp8watch.records`; they are here to keep that file short.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fp8watch.bounds import Attempt, Count, Name, Sequence, Unix, Whole


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True, tag="trace"):
    """One line of the decision log: what was found, weighed, held back, ordered, answered or concluded, and why.

    Lines are only ever added. Every line follows from what the controller was told (`Arrival`, `StepFrame`) alone, so
    that a replay writes the same bytes.
    """

    run: Name
    attempt: Attempt
    step: Whole
    time_unix: Unix
    """Time of the message that caused it, by the clock of the rank that sent it."""
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
    """Anything but a frame that the controller was told, in its place: together with the frames all that a replay
    needs."""

    run: Name
    sequence: Sequence
    """Grows with everything that arrives, frames (`StepFrame.arrival`) included. Its upper bits number the controller
    process, so that it also grows over restarts."""
    kind: Literal[
        "opened", "hello", "layout", "checkpoint", "result", "evaluation", "goodbye", "lost", "late", "disarmed",
        "approval", "taken_over", "layouts",
    ]  # fmt: skip
    """`opened`: a controller process met the run (again), and `step` is the last one that the store knew. In a cluster:
    `taken_over`: another controller continues with the memory of the last one; `layouts`: one without such a memory
    took the attempt's layouts from the store."""
    body: bytes = b""
    """The message as it travelled (`fp8watch.wire.pack`). Empty: `key` names what the store holds."""
    key: str = ""
    """Layouts: `attempt/rank/layout_id`. Lost and late (no longer waited for): the rank; empty: all that were not heard
    of. Disarmed: the reason, empty when armed again. Opened: `max_mode`. Hello, in a cluster: the node."""
    step: Count = 0
    after: str = ""
    """In a cluster: the newest entry of the run's stream that was processed before this, nodes' frames included."""
    term: Count = 0
    """Opened, taken over: term of the lease under which the controller decides (0: none)."""
