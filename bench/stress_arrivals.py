"""When commands reach a rank, counted in boundaries: the same in each run of a sequence, however busy the machine is.

Commands still travel over the socket. A rank knows from its own frames what it will be sent for them, and takes each
command at the boundary that the sequence says: an early one is held back, and a missing one is waited for. After its
connection was cut, a rank waits until it has noticed, so that nothing is sent into a dead connection.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fake_controller import Cut, Sent
from stress_sequences import Sequence

from fp8watch.records import Command, Reply, StepFrame

WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """A command that was or will be sent to this rank."""

    command: Command
    asked: int
    """Boundary of the frame that the command answers."""
    due: int
    """Boundary at which it is taken."""


class Arrivals:
    """Replaces a session's uplink, which still does all the work."""

    has_news = True
    """Asked at every boundary."""

    def __init__(self, uplink: Any, sequence: Sequence, rank: int, start: str = "") -> None:
        """`start`: that of this rank, which commands name."""
        self._uplink, self._sequence, self._rank, self._start = uplink, sequence, rank, start
        self._sent = Sent(sequence.orders, start)
        self._cuts_done: set[Cut] = set()
        self._lost_after: int | None = None
        self._out_until = 0
        self._foreseen: list[Foreseen] = []
        self._came: list[Command] = []
        self._taken: set[int] = set()
        self.boundary = 0
        """Optimizer steps made, including those of abandoned timelines; counted by the loop."""
        self.held: list[list[Any]] = []
        """[boundary, id, verb, attempt, sequence] of each command taken."""
        self.problem = ""
        """What arrived otherwise than foreseen."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._uplink, name)

    @property
    def asked(self) -> list[list[Any]]:
        """[boundary of the frame, id, verb, attempt, sequence] of each command that answers a frame of this rank."""
        return [_entry(one.asked, one.command) for one in self._foreseen]

    def send(self, message: Any) -> None:
        """Note what a frame will be answered with, and send it."""
        frame = message.frame() if hasattr(message, "frame") else message  # else the transport thread builds it
        if isinstance(frame, StepFrame):
            self._foresee(frame)
        self._uplink.send(message)

    def _foresee(self, frame: StepFrame) -> None:
        for cut in self._sequence.cuts:
            if cut.rank == self._rank and frame.step >= cut.at and cut not in self._cuts_done:
                self._cuts_done.add(cut)
                self._sent = Sent(self._sequence.orders, self._start)
                self._lost_after = self._link.num_connections
                self._out_until = self.boundary + 1 + self._sequence.outages[self._rank]
                return
        for number, command in self._sent.answer_to(frame):
            due = max(self.boundary + self._sequence.delays[number, self._rank], self._out_until)
            self._foreseen.append(Foreseen(command=command, asked=self.boundary, due=due))

    @property
    def _link(self) -> Any:
        return self._uplink._channel._link

    def take(self) -> list[Reply]:
        """The commands due at this boundary; by the clock, those that are there."""
        if self._sequence.is_by_clock:
            found = self._uplink.take()
            for reply in found:
                if isinstance(reply, Command):
                    self._hold(reply)
            return found
        if self._lost_after is not None:
            before, self._lost_after = self._lost_after, None
            self._await(lambda: not self._link.is_connected or self._link.num_connections > before, "a cut")
        due = [place for place, one in enumerate(self._foreseen) if one.due <= self.boundary]
        due = [place for place in due if place not in self._taken]
        others = self._collect()
        if due:
            self._await(lambda: others.extend(self._collect()) or len(self._came) > max(due), "a command")
        self._taken |= set(due)
        for place in sorted(due, key=lambda place: (self._foreseen[place].due, place)):
            if place < len(self._came):
                others.append(self._came[place])
                self._hold(self._came[place])
        return others

    def finish(self) -> None:
        """Check once whether more has arrived than was foreseen."""
        self._collect()
        if not self._sequence.is_by_clock:
            for place, came in enumerate(self._came):
                wanted = self._foreseen[place].command if place < len(self._foreseen) else None
                if came != wanted:
                    self.problem = self.problem or f"{came.id} came in attempt {came.attempt}, foreseen was {wanted}"

    def _collect(self) -> list[Reply]:
        """Take what has arrived from the transport: commands are kept, the rest is returned."""
        found = self._uplink.take()
        self._came += [reply for reply in found if isinstance(reply, Command)]
        return [reply for reply in found if not isinstance(reply, Command)]

    def _hold(self, command: Command) -> None:
        self.held.append(_entry(self.boundary, command))

    def _await(self, is_there: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_there():
            if time.monotonic() > deadline:
                self.problem = self.problem or f"{what} did not come by boundary {self.boundary}"
                return
            time.sleep(LOOK_SECONDS)


def _entry(boundary: int, command: Command) -> list[Any]:
    return [boundary, command.id, command.verb, command.attempt, command.sequence]
