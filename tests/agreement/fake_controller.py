"""A controller that only gives orders: a real unix socket, the real wire format, and what ranks answer kept."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fp8watch import wire
from fp8watch.errors import WireError
from fp8watch.records import CheckpointRecord, Command, CommandResult, Goodbye, Hello, Layout, StepFrame, Welcome


@dataclass(frozen=True, kw_only=True)
class Order:
    """A command, sent to each rank when its own frame of step `after` (or of its own in `late`) has come."""

    command: Command
    after: int = 3
    late: Mapping[int, int] = field(default_factory=dict)
    is_up_to_date: bool = False
    """Sent for the attempt that the rank is in then, whatever the command says."""
    is_for_first_start: bool = False
    """It names the first start of the run that was heard of, also when it is sent to a later one."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The connection to a rank ends when its frame of step `at` comes; `is_for_good`: it finds nobody any more."""

    rank: int
    at: int
    is_for_good: bool = False


class Sent:
    """What one connection to a rank has been sent. The same rule tells a rank beforehand what will come to it."""

    def __init__(self, orders: Sequence[Order], start: str, first_start: str = "") -> None:
        """`start`: that of the rank, which commands name."""
        self._orders, self._start, self._first_start = orders, start, first_start
        self._numbers: set[int] = set()

    def answer_to(self, frame: StepFrame) -> list[tuple[int, Command]]:
        """Places in the orders, and commands, that are sent when this frame has come."""
        found = []
        for number, order in enumerate(self._orders):
            if number not in self._numbers and frame.step >= order.late.get(frame.rank, order.after):
                self._numbers.add(number)
                attempt = frame.attempt if order.is_up_to_date else order.command.attempt
                start = self._first_start if order.is_for_first_start else self._start
                command = msgspec.structs.replace(order.command, attempt=attempt, start=start)
                found.append((number, command))
        return found


class FakeController:
    """Serves until it is closed. What came is kept by run."""

    def __init__(
        self, path: Path, orders: Mapping[str, Sequence[Order]], cuts: Mapping[str, Sequence[Cut]] | None = None
    ) -> None:
        self.address = f"unix://{path}"
        self.hellos: dict[str, list[Hello]] = defaultdict(list)
        self.frames: dict[str, list[StepFrame]] = defaultdict(list)
        self.layouts: dict[str, list[Layout]] = defaultdict(list)
        self.results: dict[str, list[CommandResult]] = defaultdict(list)
        self.goodbyes: dict[str, list[Goodbye]] = defaultdict(list)
        self.checkpoints: dict[str, list[CheckpointRecord]] = defaultdict(list)
        self._orders, self._cuts = orders, cuts or {}
        self._done: set[tuple[str, Cut]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        splitter = wire.Splitter()
        sent: Sent | None = None
        start = ""
        with connection, contextlib.suppress(OSError, WireError):
            while data := connection.recv(1 << 16):
                for body in splitter.feed(data):
                    message = wire.unpack_message(body)
                    if isinstance(message, Hello):
                        if self._is_gone(message.run, message.rank):
                            return
                        self.hellos[message.run].append(message)
                        start = message.start
                        welcome = Welcome(wire_version=wire.WIRE_VERSION, run=message.run, term=1)
                        connection.sendall(wire.frame(welcome))
                    elif isinstance(message, StepFrame):
                        self.frames[message.run].append(message)
                        if self._is_cut(message):
                            return
                        first = self.hellos[message.run][0].start
                        sent = sent or Sent(self._orders.get(message.run, ()), start, first)
                        for _, command in sent.answer_to(message):
                            connection.sendall(wire.frame(command))
                    elif isinstance(message, Layout):
                        self.layouts[message.run].append(message)
                    elif isinstance(message, CommandResult):
                        self.results[message.run].append(message)
                    elif isinstance(message, CheckpointRecord):
                        self.checkpoints[message.run].append(message)
                    elif isinstance(message, Goodbye):
                        self.goodbyes[message.run].append(message)

    def _is_gone(self, run: str, rank: int) -> bool:
        return any(name == run and cut.rank == rank and cut.is_for_good for name, cut in self._done)

    def _is_cut(self, frame: StepFrame) -> bool:
        for cut in self._cuts.get(frame.run, ()):
            if cut.rank == frame.rank and frame.step >= cut.at and (frame.run, cut) not in self._done:
                self._done.add((frame.run, cut))
                return True
        return False

    def close(self) -> None:
        self._listener.close()

    def answers(self, run: str, command: Command) -> dict[int, list[CommandResult]]:
        """What each rank answered to it, in order."""
        found: dict[int, list[CommandResult]] = defaultdict(list)
        for result in list(self.results[run]):
            if (result.id, result.verb) == (command.id, command.verb):
                found[result.rank].append(result)
        return dict(found)
