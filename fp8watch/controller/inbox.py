"""What one run's controller is told, numbered in the order of arrival, so that a replay can repeat it.

The store keeps frames anyway, so they only get their number. Everything else that can change a decision (hellos,
results, losses of ranks, disarming, people's verdicts, restarts of this process) is recorded as an `Arrival`. The time
of a decision is that of the message that caused it: a clock of our own could not be replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from fp8watch import wire
from fp8watch.controller.stores.base import Approval
from fp8watch.records import (
    Arrival,
    CheckpointRecord,
    CommandResult,
    Evaluation,
    Goodbye,
    Hello,
    Layout,
    Message,
    Mode,
    StepFrame,
)

PROCESS_BITS = 40
"""Bits of a sequence number that count within one process: 10^12 messages."""
REMEMBERED_FRAMES = 4096
"""Number of newest frames among which a repeated one (sent again over a new connection) is recognised."""
_KINDS = {
    Hello: "hello", Layout: "layout", CheckpointRecord: "checkpoint", CommandResult: "result",
    Evaluation: "evaluation", Goodbye: "goodbye",
}  # fmt: skip


class Inbox:
    """The numbering of one run. `earlier`: arrivals in the store, from earlier processes."""

    def __init__(self, run: str, earlier: Iterable[Arrival] = ()) -> None:
        self.run = run
        self.records: list[Arrival] = []
        """Arrivals to be stored; the service takes them away."""
        self._process = 1 + max((item.sequence >> PROCESS_BITS for item in earlier), default=0)
        self._count = 0
        self._time_unix = 0.0
        self._frames: deque[tuple[int, int, int]] = deque(maxlen=REMEMBERED_FRAMES)
        self._known: set[tuple[int, int, int]] = set()
        self._disarmed = ""
        self._approvals: dict[str, Approval] = {}
        self._after = ""
        self._node = ""

    def now(self) -> float:
        """Unix time of the newest message that carries one, by its sender's clock."""
        return self._time_unix

    def opened(self, max_mode: Mode, last_step: int, term: int = 0) -> None:
        """This process begins to decide for the run; `last_step`: the last step that the store knew."""
        self._note("opened", key=max_mode, step=last_step, term=term)

    def taken_over(self, term: int) -> None:
        """Another controller of a cluster continues here, under the term of its lease."""
        self._note("taken_over", term=term)

    def layouts(self) -> None:
        """The layouts of the current attempt were read from the store."""
        self._note("layouts")

    def heard_at(self, time_unix: float) -> None:
        """A message that is kept elsewhere (a node's frame) was made at `time_unix`."""
        self._time_unix = time_unix or self._time_unix

    def passed(self, entry_id: str, node: str = "") -> None:
        """An entry of the run's stream, from this node, is being processed; an entry that was processed before changes
        nothing."""
        self._node = node
        if entry_id and entry_number(entry_id) > entry_number(self._after):
            self._after = entry_id

    def frame(self, frame: StepFrame) -> StepFrame | None:
        """The frame with its number; None: it has already arrived."""
        key = (frame.attempt, frame.rank, frame.step)
        if key in self._known:
            return None
        if len(self._frames) == REMEMBERED_FRAMES:
            self._known.discard(self._frames[0])
        self._frames.append(key)
        self._known.add(key)
        self._time_unix = frame.time_unix or self._time_unix
        return msgspec.structs.replace(frame, arrival=self._next())

    def message(self, message: Message) -> None:
        """Any other message of a rank."""
        if isinstance(message, Layout):  # large, and in the store already
            self._note("layout", key=f"{message.attempt}/{message.rank}/{message.layout_id}")
            return
        self._time_unix = getattr(message, "time_unix", 0.0) or self._time_unix
        node = self._node if isinstance(message, Hello) else ""
        self._note(_KINDS[type(message)], body=wire.pack(message), key=node)

    def lost(self, rank: int) -> None:
        """A rank's connection ended."""
        self._note("lost", key=str(rank))

    def late(self, rank: int | None) -> None:
        """A rank's frames are no longer waited for; None: those of all that were not heard of."""
        self._note("late", key="" if rank is None else str(rank))

    def disarmed(self, why: str) -> None:
        """Whether acting is stopped; recorded where it changes."""
        if why != self._disarmed:
            self._disarmed = why
            self._note("disarmed", key=why)

    def approvals(self, approvals: Iterable[Approval]) -> None:
        """People's verdicts, each recorded once."""
        for approval in approvals:
            if self._approvals.get(approval.action_id) != approval:
                self._approvals[approval.action_id] = approval
                self._note("approval", body=wire.pack(approval))

    def _note(self, kind: str, *, body: bytes = b"", key: str = "", step: int = 0, term: int = 0) -> None:
        self.records.append(
            Arrival(
                run=self.run, sequence=self._next(), kind=kind, body=body, key=key, step=step, after=self._after,  # type: ignore[arg-type]
                term=term,
            )
        )  # fmt: skip

    def _next(self) -> int:
        self._count += 1
        return (self._process << PROCESS_BITS) + self._count


def entry_number(entry_id: str) -> tuple[int, int]:
    """A stream entry's id as comparable numbers; an empty id comes before all others."""
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds or 0), int(count or 0)
