"""One run as a node's agent serves it in cluster mode: reduce, export, forward; nothing is decided here.

The same face as `fp8watch_agent.session.RunSession`. What the controller sends arrives through `take`, and is kept
for ranks that connect later: they hear it when they are greeted, and know by its number what they have had. What is for
an earlier start of the run, whose name and stream a new one shares, is not kept.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fp8watch import wire
from fp8watch.records import (
    Command,
    Goodbye,
    Hello,
    Layout,
    LedgerUpdate,
    Message,
    NodeFrame,
    RankLost,
    Reply,
    StepFrame,
    Uplink,
    Welcome,
)
from fp8watch.transport.endpoint import Endpoint
from fp8watch_agent import targets
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.reducer import NodeReducer

logger = logging.getLogger(__name__)
MAX_BACKLOG = 256
MAX_LEDGER = 4096


class NodeSession:
    """Opened at a run's first hello on this node, closed when none of its ranks is left here."""

    def __init__(
        self,
        run: str,
        *,
        node: str,
        send: Callable[[Uplink], None],
        metrics: MetricsState,
        metrics_url: str,
        socket_path: Path,
        directory: Path,
        redis: str,
        forget: Callable[[], None] = lambda: None,
        learn_term: Callable[[int], None] = lambda term: None,
    ) -> None:
        self.run = run
        self._node = node
        self._send = send
        self._metrics = metrics
        self._forget = forget
        self._learn_term = learn_term
        self._directory = directory
        self._reducer = NodeReducer(run, node, time.monotonic)
        self._term = 0
        self._attempt = 0
        self._starts: dict[int, str] = {}
        """Rank -> the start that it is of (`Hello.start`): nothing that is for another is handed to them."""
        self._counted: dict[str, int] = {}
        self._warnings: list[str] = []
        self._contested = ""
        """Why the controller refuses what this node says of the run."""
        self._has_news = False
        self._commands: dict[tuple[int, int], Command] = {}
        self._ledger: dict[str, LedgerUpdate] = {}
        self._endpoint = Endpoint(
            run=run, pid=os.getpid(), host=socket.gethostname(), socket=str(socket_path), metrics_url=metrics_url,
            store="", redis=redis, started_unix=time.time(),
        )  # fmt: skip
        targets.announce(self._directory, self._endpoint)

    def warn(self, warning: str) -> None:
        """Tell ranks that connect from now on something that a person should know."""
        self._warnings.append(warning)

    def receive(self, message: Message) -> list[Reply]:
        """Take a rank's message in. The answer to a hello is for its sender."""
        try:
            self._export(message)
        except Exception as error:
            logger.warning("message of run %s was not exported: %s", self.run, error)
            self._metrics.drop(self.run, "malformed")
        if isinstance(message, StepFrame):
            self._forward(self._reducer.frame(message))
        elif isinstance(message, Layout):
            self._new_layout(self._reducer.layout(message))
        elif isinstance(message, Hello):
            self._reducer.ranks.add(message.rank)
            self._begin(message)
            self._send(message)
            return [self._welcome()]
        else:
            if isinstance(message, Goodbye):
                self._forward(self._reducer.left(message.rank))
            self._send(message)
        return []

    def backlog(self) -> list[Reply]:
        """What a rank that has just connected may not have heard."""
        return [*self._ledger.values(), *(self._commands[key] for key in sorted(self._commands))]

    def take(self, reply: Command | LedgerUpdate) -> list[Reply]:
        """The controller's message; what goes to the ranks that are connected."""
        if not self._is_wanted(reply):
            return []
        if isinstance(reply, LedgerUpdate):
            self._ledger.pop(reply.checkpoint, None)
            self._ledger[reply.checkpoint] = reply
            while len(self._ledger) > MAX_LEDGER:
                del self._ledger[next(iter(self._ledger))]
            return [reply]
        if reply.term > self._term:
            self._term = reply.term
            self._learn_term(reply.term)
        self._commands[reply.term, reply.sequence] = reply
        while len(self._commands) > MAX_BACKLOG:
            del self._commands[min(self._commands)]
        return [reply]

    def lost(self, rank: int) -> list[Reply]:
        """A rank is lost."""
        self._forward(self._reducer.left(rank))
        self._send(RankLost(run=self.run, rank=rank, node=self._node))
        return []

    def tick(self) -> list[Reply]:
        """Regular business."""
        self._forward(self._reducer.tick())
        for reason, count in self._reducer.lost.items():
            for _ in range(count - self._counted.get(reason, 0)):
                self._metrics.drop(self.run, reason)
            self._counted[reason] = count
        return []

    def contested(self, why: str) -> None:
        """The controller refuses this node's part of the run (empty: no longer): the ranks are told."""
        if why and why != self._contested:
            logger.warning("%s", why)
            self._has_news = True
        self._contested = why

    def news(self) -> Welcome | None:
        """A welcome with what came up after the ranks were greeted; other warnings are said at the greeting only."""
        if not self._has_news:
            return None
        self._has_news = False
        return self._welcome()

    def close(self) -> None:
        """No rank of the run is left here."""
        self._forward(self._reducer.tick())
        self._forget()
        targets.announce(
            self._directory, msgspec.structs.replace(self._endpoint, state="ended", socket="", metrics_url="")
        )

    def _begin(self, hello: Hello) -> None:
        """A rank has introduced itself: what was for an earlier start or attempt is let go."""
        if hello.start and hello.start not in self._starts.values():
            self._starts = {rank: start for rank, start in self._starts.items() if not start}
            self._attempt = 0  # a new start may count them anew
        self._starts[hello.rank] = hello.start
        self._attempt = max(self._attempt, hello.attempt)
        self._commands = {key: command for key, command in self._commands.items() if self._is_wanted(command)}
        self._ledger = {name: update for name, update in self._ledger.items() if self._is_wanted(update)}

    def _is_wanted(self, reply: Command | LedgerUpdate) -> bool:
        """Whether it is for the ranks that are here. What names no start, of a controller of an earlier version, is for
        them to refuse."""
        if reply.start and reply.start not in self._starts.values():
            return False
        if reply.nodes and self._node not in reply.nodes:
            return False  # of the run of that name that is trained elsewhere
        return isinstance(reply, LedgerUpdate) or reply.attempt >= self._attempt

    def _forward(self, frames: list[NodeFrame]) -> None:
        for frame in frames:
            self._metrics.observe_node(frame)
            self._send(frame)

    def _new_layout(self, layout: Layout | None) -> None:
        if layout is not None:
            self._metrics.observe_node(layout)
            self._send(layout)

    def _export(self, message: Message) -> None:
        # Tensors are exported from the node's frame: a sixteenth of the work of doing it rank by rank.
        if isinstance(message, StepFrame):
            message = msgspec.structs.replace(message, columns={})
        elif isinstance(message, Layout):
            message = msgspec.structs.replace(message, columns=message.columns[:1])
        self._metrics.observe(message)

    def _welcome(self) -> Welcome:
        return Welcome(
            wire_version=wire.WIRE_VERSION, run=self.run, term=self._term, metrics_url=self._endpoint.metrics_url,
            store=self._endpoint.store, warnings=[*self._warnings, *filter(None, [self._contested])],
        )  # fmt: skip
