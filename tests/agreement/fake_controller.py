"""A controller that only gives orders: a real unix socket, the real wire format, and what ranks answer kept."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fp8watch import wire
from fp8watch.errors import WireError
from fp8watch.records import Command, CommandResult, Goodbye, Hello, StepFrame, Welcome


@dataclass(frozen=True, kw_only=True)
class Order:
    """A command, sent to each rank when its own frame of step `after` (or of its own in `late`) has come."""

    command: Command
    after: int = 3
    late: Mapping[int, int] = field(default_factory=dict)


class FakeController:
    """Serves until it is closed. What came is kept by run."""

    def __init__(self, path: Path, orders: Mapping[str, Sequence[Order]]) -> None:
        self.address = f"unix://{path}"
        self.hellos: dict[str, list[Hello]] = defaultdict(list)
        self.frames: dict[str, list[StepFrame]] = defaultdict(list)
        self.results: dict[str, list[CommandResult]] = defaultdict(list)
        self.goodbyes: dict[str, list[Goodbye]] = defaultdict(list)
        self._orders = orders
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
        splitter, sent = wire.Splitter(), set[int]()
        with connection, contextlib.suppress(OSError, WireError):
            while data := connection.recv(1 << 16):
                for body in splitter.feed(data):
                    message = wire.unpack_message(body)
                    if isinstance(message, Hello):
                        self.hellos[message.run].append(message)
                        welcome = Welcome(wire_version=wire.WIRE_VERSION, run=message.run, term=1)
                        connection.sendall(wire.frame(welcome))
                    elif isinstance(message, StepFrame):
                        self.frames[message.run].append(message)
                        for number, order in enumerate(self._orders.get(message.run, ())):
                            if number not in sent and message.step >= order.late.get(message.rank, order.after):
                                sent.add(number)
                                connection.sendall(wire.frame(order.command))
                    elif isinstance(message, CommandResult):
                        self.results[message.run].append(message)
                    elif isinstance(message, Goodbye):
                        self.goodbyes[message.run].append(message)

    def close(self) -> None:
        self._listener.close()

    def answers(self, run: str, command: Command) -> dict[int, list[CommandResult]]:
        """What each rank answered to it, in order."""
        found: dict[int, list[CommandResult]] = defaultdict(list)
        for result in self.results[run]:
            if (result.id, result.verb) == (command.id, command.verb):
                found[result.rank].append(result)
        return dict(found)
