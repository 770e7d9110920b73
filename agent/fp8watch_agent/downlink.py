"""The thread that reads what the controller sends for the runs of this node.

A reader of its own, from the start of each run's stream: an agent that was restarted hears again what it may have
missed, and ranks know what they have had by its number. `deliver` gets every reply once.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.cluster.redis_link import BLOCK_MS, RedisError, RedisLink, reason_of, words_of
from fp8watch.errors import WireError
from fp8watch.records import Command, LedgerUpdate
from fp8watch.security import Verifier

logger = logging.getLogger(__name__)
MAX_RETRY_SECONDS = 2.0
POLL_SECONDS = 0.1
"""Between looks where streams of several runs cannot be read in one call (Redis Cluster), and without runs."""
COUNT = 256


class DownlinkThread(threading.Thread):
    """Owns one connection. `deliver` is called on this thread."""

    def __init__(
        self,
        link: RedisLink,
        deliver: Callable[[Command | LedgerUpdate], None],
        on_error: Callable[[str], None],
        verifier: Verifier | None,
    ) -> None:
        """`verifier` None: nothing is passed on, for nobody could tell a command from a forged one."""
        super().__init__(name="fp8watch-downlink", daemon=True)
        self._link = link
        self._redis: Any = link.client
        self._deliver = deliver
        self._on_error = on_error
        self._verifier = verifier
        self._positions: dict[str, str] = {}
        self._stopping = threading.Event()
        self._is_away = False

    def follow(self, run: str) -> None:
        """Read a run's commands from now on, from the first that is kept."""
        self._positions = {**self._positions, run: self._positions.get(run, "0-0")}

    def leave(self, run: str) -> None:
        """Read a run's commands no longer."""
        self._positions = {name: at for name, at in self._positions.items() if name != run}

    def stop(self, seconds: float = 2.0) -> None:
        """End soon."""
        self._stopping.set()
        self.join(seconds)

    def run(self) -> None:
        """Thread body."""
        retry_seconds = 0.1
        while not self._stopping.is_set():
            try:
                self._read()
            except (RedisError, OSError) as error:
                reason = reason_of(error)
                self._on_error(reason)
                if not self._is_away:
                    self._is_away = True
                    logger.warning("redis at %s: %s (%s); commands wait", self._link.shown, reason, words_of(error))
                self._link.reset()
                self._stopping.wait(retry_seconds * random.uniform(0.5, 1.0))
                retry_seconds = min(retry_seconds * 2, MAX_RETRY_SECONDS)
                continue
            except Exception:
                logger.exception("downlink from %s failed", self._link.shown)
                self._stopping.wait(MAX_RETRY_SECONDS)
                continue
            if self._is_away:
                self._is_away = False
                logger.info("redis at %s gives commands again", self._link.shown)
            retry_seconds = 0.1
        self._link.close()

    def _read(self) -> None:
        positions = dict(self._positions)
        if not positions:
            self._stopping.wait(POLL_SECONDS)
            return
        streams = {RunKeys(run).commands: at for run, at in positions.items()}
        if self._link.is_cluster:
            found = [item for key, at in streams.items() for item in self._redis.xread({key: at}, count=COUNT) or []]
            if not found:
                self._stopping.wait(POLL_SECONDS)
        else:
            found = self._redis.xread(streams, count=COUNT, block=BLOCK_MS // 2) or []
        by_key = {RunKeys(run).commands: run for run in positions}
        for key, entries in found.items() if isinstance(found, dict) else found:
            run = by_key[key.decode()]
            for entry_id, fields in entries:
                self._take(run, fields)
                if run in self._positions:
                    self._positions[run] = entry_id.decode()

    def _take(self, run: str, fields: dict[bytes, bytes]) -> None:
        try:
            reply = wire.unpack_reply(fields[b"b"])
        except (WireError, KeyError) as error:
            logger.warning("a reply for run %s was not understood: %s", run, error)
            self._on_error("malformed")
            return
        if not isinstance(reply, Command | LedgerUpdate) or reply.run != run:
            return
        if self._is_genuine(reply):
            self._deliver(reply)
        else:
            self._on_error("forged")
            logger.warning("%s for run %s is not signed by a controller", type(reply).__name__, run)

    def _is_genuine(self, reply: Command | LedgerUpdate) -> bool:
        if self._verifier is None:
            return False
        return self._verifier.command(reply) if isinstance(reply, Command) else self._verifier.ledger(reply)
