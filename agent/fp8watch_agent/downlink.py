"""The thread that reads the controller's commands and verdicts on checkpoints from Redis.

It reads each run's stream from the start, without a consumer group. A restarted agent therefore reads again what it may
have missed, and ranks recognise repeated commands by their sequence number. `deliver` also gets replies for an earlier
start of the run; `fp8watch_agent.node_session` drops them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster.contest import RENEW_SECONDS, Contest, decode
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.cluster.redis_link import BLOCK_MS, RedisError, RedisLink, reason_of, words_of
from fp8watch.errors import WireError
from fp8watch.records import Command, LedgerUpdate
from fp8watch.security import Verifier

logger = logging.getLogger(__name__)
MAX_RETRY_SECONDS = 2.0
POLL_SECONDS = 0.1
"""Pause between reads without runs, and on Redis Cluster, where one call cannot read the streams of several runs."""
COUNT = 256


class DownlinkThread(threading.Thread):
    """Owns one connection to Redis. Calls `deliver` on this thread."""

    def __init__(
        self,
        link: RedisLink,
        deliver: Callable[[Command | LedgerUpdate], None],
        on_error: Callable[[str], None],
        verifier: Verifier | None,
        *,
        node: str,
        on_contest: Callable[[str, Contest | None], None],
    ) -> None:
        """Without a `verifier` nothing is delivered, because a forged command could not be recognised. `on_contest` is
        called on this thread while the controller refuses this node's part of a run, and once with None when it
        stops."""
        super().__init__(name="fp8watch-downlink", daemon=True)
        self._link = link
        self._redis: Any = link.client
        self._deliver = deliver
        self._on_error = on_error
        self._verifier = verifier
        self._node = node
        self._on_contest = on_contest
        self._contested: set[str] = set()
        self._contests_at = 0.0
        self._positions: dict[str, str] = {}
        self._stopping = threading.Event()
        self._is_away = False

    def follow(self, run: str) -> None:
        """Read a run's stream from its oldest entry on."""
        self._positions = {**self._positions, run: self._positions.get(run, "0-0")}

    def leave(self, run: str) -> None:
        """Stop reading a run's stream."""
        self._positions = {name: at for name, at in self._positions.items() if name != run}

    def stop(self, seconds: float = 2.0) -> None:
        """Stop the thread; wait at most `seconds`."""
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
        self._look_for_contests(list(positions))
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

    def _look_for_contests(self, runs: list[str]) -> None:
        """Ask every `RENEW_SECONDS` whether the controller refuses this node's part of its runs."""
        now = time.monotonic()
        if now - self._contests_at < RENEW_SECONDS:
            return
        self._contests_at = now
        with self._redis.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.get(RunKeys(run).contested(self._node))
            answers = pipe.execute(raise_on_error=False)
        for run, answer in zip(runs, answers, strict=True):
            # An ACL of an earlier version denies this key. Commands must arrive all the same.
            self._contest_of(run, None if isinstance(answer, Exception) else decode(answer))

    def _contest_of(self, run: str, contest: Contest | None) -> None:
        if contest is not None:
            self._contested.add(run)
        elif run in self._contested:
            self._contested.discard(run)
        else:
            return
        self._on_contest(run, contest)

    def _take(self, run: str, fields: dict[bytes, bytes]) -> None:
        try:
            reply = wire.unpack_reply(fields[b"b"])
        except (WireError, KeyError) as error:
            logger.warning("a reply for run %s was not understood: %s", run, error)
            self._on_error("malformed")
            return
        if not isinstance(reply, Command | LedgerUpdate) or reply.run != run:
            return
        if not self._is_genuine(reply):
            self._on_error("forged")
            logger.warning("%s for run %s is not signed by a controller", type(reply).__name__, run)
        elif isinstance(reply, Command) or self._is_news(reply):
            self._deliver(reply)
        else:
            logger.info(
                "checkpoint %s of %s: label %s ignored, a later one has been applied",
                reply.checkpoint,
                run,
                reply.label,
            )

    def _is_genuine(self, reply: Command | LedgerUpdate) -> bool:
        if self._verifier is None:
            return False
        return self._verifier.command(reply) if isinstance(reply, Command) else self._verifier.ledger(reply)

    def _is_news(self, update: LedgerUpdate) -> bool:
        """Whether no newer verdict was seen. After a run returns to this node, its stream is read from the start, with
        verdicts that have been replaced since."""
        return self._verifier is not None and self._verifier.is_news(update)
