"""The session of one run without a cluster: its store, controller and endpoint file.

`Controller` is the part of `fp8watch.controller.service.RunController` that is used here. What it raises is logged and
counted, so that one bad message does not end the monitoring of a run.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from fp8watch import wire
from fp8watch.controller.stores.base import Store
from fp8watch.records import Command, Hello, LedgerUpdate, Message, Reply, Stored, Welcome
from fp8watch.transport.endpoint import Endpoint
from fp8watch_agent import store_place, targets
from fp8watch_agent.guarded_store import GuardedStore
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.options import AgentOptions
from fp8watch_agent.questions import Questions

logger = logging.getLogger(__name__)


class Controller(Protocol):
    """Detects, decides and commands. Replies go to all ranks of the run, a `Welcome` to the sender only."""

    def receive(self, message: Message) -> list[Reply]:
        """Process a rank's message."""

    def lost(self, run: str, rank: int) -> list[Reply]:
        """A rank disconnected without goodbye and did not come back."""

    def tick(self) -> list[Reply]:
        """Called about once a second."""


ControllerFactory = Callable[[Store, Callable[[Stored], None]], Controller]
"""Makes a run's controller from its store and a listener that is called with every stored record."""


class RunSession:
    """Opened at a run's first hello (embedded: at the start), closed when no rank is left."""

    def __init__(
        self, run: str, *, options: AgentOptions, metrics: MetricsState, metrics_url: str, make: ControllerFactory
    ) -> None:
        self.run = run
        self._metrics = metrics
        self._term = 0
        self._unsaid: list[str] = []
        self._questions = Questions()
        self._has_store_failed = False
        opened = store_place.open_store(options, run)
        for warning in opened.warnings:
            logger.warning("%s", warning)
            metrics.store_error(run)
        self._warnings = list(opened.warnings)
        self._directory = opened.endpoint_directory
        self._endpoint = Endpoint(
            run=run,
            pid=os.getpid(),
            host=socket.gethostname(),
            socket=str(options.socket),
            metrics_url=metrics_url,
            store=opened.path,
            started_unix=time.time(),
        )
        self._store = GuardedStore(opened.store, self._store_failed)
        self._controller = make(self._store, self._heard)
        self._announce(self._endpoint)

    def warn(self, warning: str) -> None:
        """Send a warning to every rank of the run."""
        self._warnings.append(warning)
        self._unsaid.append(warning)

    def receive(self, message: Message) -> list[Reply]:
        """Pass a message to the metrics and the controller; returns the replies."""
        try:
            self._metrics.observe(message)
        except Exception as error:
            logger.warning("message of run %s was not exported: %s", self.run, error)
            self._metrics.drop(self.run, "malformed")
        replies = self._ask(lambda: self._controller.receive(message))
        if isinstance(message, Hello):
            return self._welcomed(replies)
        return replies

    def lost(self, rank: int) -> list[Reply]:
        """A rank is lost."""
        return self._ask(lambda: self._controller.lost(self.run, rank))

    def tick(self) -> list[Reply]:
        """Let the controller do its periodic work."""
        return self._ask(self._controller.tick)

    def backlog(self) -> list[Reply]:
        """Empty: this process's controller replies to every hello itself."""
        return []

    def take(self, reply: Command | LedgerUpdate) -> list[Reply]:
        """Empty: there is no cluster."""
        return []

    def contested(self, why: str) -> None:
        """Does nothing: there is no cluster."""

    def news(self) -> Welcome | None:
        """A welcome for all ranks with the warnings since their hello; None: no new ones."""
        if not self._unsaid:
            return None
        self._unsaid.clear()
        return self._welcome()

    def questions(self) -> Welcome | None:
        """A welcome for one rank with what is new about actions that wait for a person; None: nothing is."""
        told = self._questions.take()
        return msgspec.structs.replace(self._welcome(), warnings=told) if told else None

    def close(self) -> None:
        """Close the store and mark the endpoint as ended."""
        self._store.close()
        self._announce(msgspec.structs.replace(self._endpoint, state="ended", socket="", metrics_url=""))

    def _heard(self, record: Stored) -> None:
        self._questions.hear(record)
        self._metrics.record(record)

    def _ask(self, question: Callable[[], list[Reply]]) -> list[Reply]:
        try:
            return question()
        except Exception:
            logger.exception("controller of run %s failed", self.run)
            self._metrics.drop(self.run, "controller_error")
            return []

    def _welcomed(self, replies: list[Reply]) -> list[Reply]:
        for reply in replies:
            if isinstance(reply, Welcome):
                self._term = max(self._term, reply.term)
        return [self._welcome(), *(reply for reply in replies if not isinstance(reply, Welcome))]

    def _welcome(self) -> Welcome:
        return Welcome(
            wire_version=wire.WIRE_VERSION,
            run=self.run,
            term=self._term,
            metrics_url=self._endpoint.metrics_url,
            store=self._endpoint.store,
            warnings=list(self._warnings),
        )

    def _store_failed(self, run: str, reason: str) -> None:
        self._metrics.store_error(run or self.run)
        if not self._has_store_failed:
            self._has_store_failed = True
            logger.warning("store of run %s: %s", self.run, reason)
            self.warn(f"store at {self._endpoint.store or 'memory'} cannot be written ({reason}); training goes on")

    def _announce(self, endpoint: Endpoint) -> None:
        if not targets.announce(self._directory, endpoint):
            self._metrics.store_error(self.run)
