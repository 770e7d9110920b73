"""What one run's controller is told, numbered in the order in which it came: a replay hands over the same again.

Frames are kept by the store anyway and get their number only; everything else that can change a decision (hellos,
results, losses of ranks, disarming, people's verdicts, restarts of this process) is written down as an `Arrival`.
The time of a decision is that of the message that brought it about: a clock of our own could not be replayed.
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
"""Newest frames by which a repeated one (sent again over a new connection) is told."""
_KINDS = {
    Hello: "hello", Layout: "layout", CheckpointRecord: "checkpoint", CommandResult: "result",
    Evaluation: "evaluation", Goodbye: "goodbye",
}  # fmt: skip


class Inbox:
    """Numbers of one run. `earlier`: the arrivals that the store knows from processes before."""

    def __init__(self, run: str, earlier: Iterable[Arrival] = ()) -> None:
        self.run = run
        self.records: list[Arrival] = []
        """What is to be stored, taken away by the service."""
        self._process = 1 + max((item.sequence >> PROCESS_BITS for item in earlier), default=0)
        self._count = 0
        self._time_unix = 0.0
        self._frames: deque[tuple[int, int, int]] = deque(maxlen=REMEMBERED_FRAMES)
        self._known: set[tuple[int, int, int]] = set()
        self._disarmed = ""
        self._approvals: dict[str, Approval] = {}
        self._after = ""

    def now(self) -> float:
        """Unix time of the newest message that carries one, by its sender's clock."""
        return self._time_unix

    def opened(self, max_mode: Mode, last_step: int, term: int = 0) -> None:
        """This process begins to decide for the run; `last_step`: as far as the store knew it had come."""
        self._note("opened", key=max_mode, step=last_step, term=term)

    def taken_over(self, term: int) -> None:
        """Another controller of a cluster goes on here, under the term of its lease."""
        self._note("taken_over", term=term)

    def layouts(self) -> None:
        """The layouts that the store has of the present attempt were taken in."""
        self._note("layouts")

    def heard_at(self, time_unix: float) -> None:
        """A message that is kept elsewhere (a node's frame) was made at `time_unix`."""
        self._time_unix = time_unix or self._time_unix

    def passed(self, entry_id: str) -> None:
        """An entry of the run's stream is dealt with now; one that was there before changes nothing."""
        if entry_id and entry_number(entry_id) > entry_number(self._after):
            self._after = entry_id

    def frame(self, frame: StepFrame) -> StepFrame | None:
        """The frame with its number; None: it was here already."""
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
        """Anything else that a rank sends."""
        if isinstance(message, Layout):  # large, and in the store already
            self._note("layout", key=f"{message.attempt}/{message.rank}/{message.layout_id}")
            return
        self._time_unix = getattr(message, "time_unix", 0.0) or self._time_unix
        self._note(_KINDS[type(message)], body=wire.pack(message))

    def lost(self, rank: int) -> None:
        """A rank's connection ended."""
        self._note("lost", key=str(rank))

    def late(self, rank: int) -> None:
        """A rank's frames are not waited for any more."""
        self._note("late", key=str(rank))

    def disarmed(self, why: str) -> None:
        """Whether acting is stopped, written down where it changes."""
        if why != self._disarmed:
            self._disarmed = why
            self._note("disarmed", key=why)

    def approvals(self, approvals: Iterable[Approval]) -> None:
        """People's verdicts, each written down once."""
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
    """A stream entry's id as numbers that can be compared; of none: before all."""
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds or 0), int(count or 0)
