"""The session of one run in cluster mode: it reduces, exports and forwards frames, and makes no decisions.

It has the interface of `fp8watch_agent.session.RunSession`. Replies from the controller arrive through `take` and are
kept for ranks that connect later. Ranks recognise by the sequence number what they have had. A reply for an earlier
start of the run, which had the same name and stream, is not kept.
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
        """Rank -> its `Hello.start`. Replies for other starts are not delivered."""
        self._counted: dict[str, int] = {}
        self._warnings: list[str] = []
        self._contested = ""
        """Why the controller refuses this node's part of the run; empty: it does not."""
        self._has_news = False
        self._commands: dict[tuple[int, int], Command] = {}
        self._ledger: dict[str, LedgerUpdate] = {}
        self._endpoint = Endpoint(
            run=run, pid=os.getpid(), host=socket.gethostname(), socket=str(socket_path), metrics_url=metrics_url,
            store="", redis=redis, started_unix=time.time(),
        )  # fmt: skip
        targets.announce(self._directory, self._endpoint)

    def warn(self, warning: str) -> None:
        """Add a warning to the welcome of ranks that connect from now on."""
        self._warnings.append(warning)

    def receive(self, message: Message) -> list[Reply]:
        """Process a rank's message. The reply to a hello is for its sender only."""
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
        """Replies that a rank which has just connected may have missed."""
        return [*self._ledger.values(), *(self._commands[key] for key in sorted(self._commands))]

    def take(self, reply: Command | LedgerUpdate) -> list[Reply]:
        """Process a reply from the controller. Returns what to send to the connected ranks."""
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
        """Forward frames that have waited long enough, and count lost ones."""
        self._forward(self._reducer.tick())
        for reason, count in self._reducer.lost.items():
            for _ in range(count - self._counted.get(reason, 0)):
                self._metrics.drop(self.run, reason)
            self._counted[reason] = count
        return []

    def contested(self, why: str) -> None:
        """The controller refuses this node's part of the run (empty: no longer). The ranks are warned."""
        if why and why != self._contested:
            logger.warning("%s", why)
            self._has_news = True
        self._contested = why

    def news(self) -> Welcome | None:
        """A welcome with a refusal that began after the ranks connected. Other warnings are sent at the hello only."""
        if not self._has_news:
            return None
        self._has_news = False
        return self._welcome()

    def questions(self) -> Welcome | None:
        """None: the actions that wait are known to the cluster's controller only."""
        return None

    def close(self) -> None:
        """No rank of the run is left on this node."""
        self._forward(self._reducer.tick())
        self._forget()
        targets.announce(
            self._directory, msgspec.structs.replace(self._endpoint, state="ended", socket="", metrics_url="")
        )

    def _begin(self, hello: Hello) -> None:
        """Drop replies that are for an earlier start or attempt than this rank's."""
        if hello.start and hello.start not in self._starts.values():
            self._starts = {rank: start for rank, start in self._starts.items() if not start}
            self._attempt = 0  # a new start may count attempts from 0
        self._starts[hello.rank] = hello.start
        self._attempt = max(self._attempt, hello.attempt)
        self._commands = {key: command for key, command in self._commands.items() if self._is_wanted(command)}
        self._ledger = {name: update for name, update in self._ledger.items() if self._is_wanted(update)}

    def _is_wanted(self, reply: Command | LedgerUpdate) -> bool:
        """Whether a reply is for ranks on this node. One without a start, from a controller of an earlier version, is
        kept; the ranks check it."""
        if reply.start and reply.start not in self._starts.values():
            return False
        if reply.nodes and self._node not in reply.nodes:
            return False  # for a run of the same name on other nodes
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
        # Tensors are exported once, from the node's frame, and not again for each rank.
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
