"""The thread that sends this node's messages to Redis, in order, and keeps them on disk while Redis is unreachable.

No other part of the agent waits for Redis. Messages are numbered, and signed if there is a key, when they are taken
from the queue. The receiver recognises a message sent twice by its number.

While Redis is unreachable, messages go to the spool, which is sent first when Redis is back.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fp8watch import __version__, wire
from fp8watch.controller.cluster import redis_keys
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.cluster.redis_link import RedisError, RedisLink, ResponseError, reason_of, words_of
from fp8watch.records import Goodbye, Hello, Layout, NodeFrame, RankLost, Uplink
from fp8watch.security.envelope import Sealer
from fp8watch_agent.namesake import Namesake
from fp8watch_agent.sent_runs import AnnounceAgain, RunOver, SentRun, TermSeen, layout_field, rank_field
from fp8watch_agent.spool import Entry, Spool

logger = logging.getLogger(__name__)
MAX_QUEUED = 4096
BATCH_ENTRIES = 64
BATCH_BYTES = 4 * 1024**2
PRESENCE_SECONDS = 2.0
PRESENCE_TTL_MS = 15_000
"""An agent without a sign of life for this long counts as gone, with its ranks."""
TRIM_SECONDS = 10.0
FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 2.0
_encoder = msgspec.msgpack.Encoder()


class UplinkThread(threading.Thread):
    """Owns one connection to Redis. `send` may be called from any thread and never blocks."""

    def __init__(
        self,
        link: RedisLink,
        *,
        node: str,
        sealer: Sealer,
        spool: Spool,
        keep_seconds: float,
        metrics_url: str = "",
        keys: Mapping[str, object] | None = None,
        on_error: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`keys`: the fingerprints of the agent's keys (`fp8watch.security.keyring.shown`)."""
        super().__init__(name="fp8watch-uplink", daemon=True)
        self._link = link
        self._redis: Any = link.client
        self._node = node
        self._sealer = sealer
        self._spool = spool
        self._keep_seconds = keep_seconds
        self._metrics_url = metrics_url
        self._keys = dict(keys or {})
        self._on_error = on_error
        self._queue: deque[Uplink | RunOver | AnnounceAgain | TermSeen] = deque()
        self._sent_runs: dict[str, SentRun] = {}
        self._gone: list[tuple[str, str]] = []
        """(run, field of its `ranks` hash) to be removed."""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._presence_at = self._trim_at = self._retry_at = self._away_since = 0.0
        self._since_unix = time.time()
        self._namesake = Namesake(os.getpid(), self._since_unix, time.monotonic)
        self._said: set[str] = set()
        self.is_away = False
        """Whether Redis is unreachable or refuses writes. Messages then go to the spool."""
        self.lost: Counter[str] = Counter()
        self.sent = 0
        self.sent_bytes = 0
        self.replayed = 0
        """Number of entries sent from the spool."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes in the spool."""
        return self._spool.size_bytes

    @property
    def spool_errors(self) -> int:
        """Failed writes to the spool."""
        return self._spool.errors

    @property
    def dropped(self) -> dict[str, int]:
        """Lost messages by reason."""
        return dict(self.lost + self._spool.lost)

    def send(self, message: Uplink | RunOver | AnnounceAgain | TermSeen) -> None:
        """Queue a message. A full queue drops its oldest one, which is counted."""
        if len(self._queue) >= MAX_QUEUED:
            self._queue.popleft()
            self.lost["queue_full"] += 1
        self._queue.append(message)
        self._wake.set()

    def stop(self, seconds: float = 3.0) -> None:
        """Send the queue, spool what cannot be sent, and stop the thread."""
        self._stopping.set()
        self._wake.set()
        self.join(seconds)

    def learn_term(self, run: str, term: int) -> None:
        """A command of this term has arrived. Ranks that are announced again have seen it."""
        self.send(TermSeen(run, term))

    def announce_again(self, run: str) -> None:
        """Announce a run's ranks again: the controller has refused them and may accept them now. Thread-safe."""
        self.send(AnnounceAgain(run))

    def forget(self, run: str) -> None:
        """A run is over on this node. Takes effect after the messages already queued. Thread-safe."""
        self.send(RunOver(run))

    def run(self) -> None:
        """Thread body."""
        while True:
            is_last = self._stopping.is_set()
            try:
                self._round()
            except Exception:
                logger.exception("uplink to %s failed", self._link.shown)
                self.lost["uplink_error"] += 1
            if is_last:
                break
            if not self._queue:
                self._wake.wait(0.2)
            self._wake.clear()
        self._to_spool()
        self._spool.close()
        self._link.close()

    def _round(self) -> None:
        now = time.monotonic()
        if self.is_away or not self._spool.is_empty:
            self._to_spool()
            if now < self._retry_at:
                return
        try:
            while not self._spool.is_empty:
                entries = self._spool.peek(BATCH_ENTRIES, BATCH_BYTES)
                if not entries:
                    break
                self._post(entries)
                self._spool.drop(len(entries))
                self.replayed += len(entries)
                self._to_spool()
            self._keep_up(now)
            while self._queue:
                self._send_batch()
        except (RedisError, OSError) as error:
            self._failed(error)
            return
        if self.is_away:
            self.is_away = False
            if now - self._away_since > PRESENCE_TTL_MS / 2000:
                for run in list(self._sent_runs):
                    self.send(AnnounceAgain(run))
            self._presence_at = 0.0  # check now whether Redis still has this node's runs
            logger.info("redis at %s takes frames again; %d from the spool sent", self._link.shown, self.replayed)
        self._retry_seconds = FIRST_RETRY_SECONDS

    def _send_batch(self) -> None:
        entries: list[Entry] = []
        size = 0
        while self._queue and len(entries) < BATCH_ENTRIES and size < BATCH_BYTES:
            entry = self._next()
            if entry is not None:
                entries.append(entry)
                size += entry.size
        try:
            self._post(entries)
        except (RedisError, OSError):
            for entry in entries:
                self._spool.put(entry)
            raise

    def _to_spool(self) -> None:
        while self._queue:
            entry = self._next()
            if entry is not None:
                self._spool.put(entry)

    def _next(self) -> Entry | None:
        """Take the next message from the queue and seal it; None: there is nothing to send for it."""
        message = self._queue.popleft()
        if not isinstance(message, RunOver | AnnounceAgain | TermSeen):
            return self._sealed(message)
        known = self._sent_runs.get(message.run)
        if known is None:
            return None
        if isinstance(message, TermSeen):
            known.learn_term(message.term)
        elif isinstance(message, AnnounceAgain):
            self._queue.extendleft(reversed(known.announcement()))
        else:
            for rank in list(known.hellos):
                self._left(message.run, rank)
            self._sent_runs.pop(message.run, None)
        return None

    def _left(self, run: str, rank: int) -> None:
        """A rank has left this node."""
        known = self._sent_runs.get(run, SentRun())
        known.hellos.pop(rank, None)
        known.sealed.pop(rank, None)
        self._gone.append((run, rank_field(rank, self._node)))
        if not known.hellos:
            self._sent_runs.pop(run, None)
            self._gone.append((run, layout_field(self._node)))

    def _sealed(self, message: Uplink) -> Entry | None:
        """Seal a message and update the run's record. Every message that leaves the node passes here."""
        if isinstance(message, Hello):
            self._sent_runs.setdefault(message.run, SentRun()).hellos[message.rank] = message
            self._presence_at = 0.0  # a continued run must not expire with its earlier end
        elif isinstance(message, Layout):
            self._sent_runs.setdefault(message.run, SentRun()).layout = message
        elif isinstance(message, Goodbye | RankLost):
            self._left(message.run, message.rank)
        try:
            data = _encoder.encode(self._sealer.seal(wire.pack(message)))
        except Exception as error:
            logger.warning("message of run %s cannot be sent: %s", message.run, error)
            self.lost["unencodable"] += 1
            return None
        if isinstance(message, Hello):
            self._sent_runs[message.run].sealed[message.rank] = data
        elif isinstance(message, Layout):
            self._sent_runs[message.run].sealed_layout = data
        return Entry(message.run, isinstance(message, NodeFrame), data)

    def _post(self, entries: list[Entry]) -> None:
        """Send entries in order. Raises if Redis refused one; all have to be sent again then."""
        gone = self._gone[:]
        written: dict[str, bytes | None] = {}
        with self._redis.pipeline(transaction=False) as pipe:
            for run, name in gone:
                pipe.hdel(RunKeys(run).ranks, name)
            for entry in entries:
                keys = RunKeys(entry.run)
                if not entry.is_frame:
                    pipe.sadd(redis_keys.ACTIVE, entry.run)
                    known = self._sent_runs.get(entry.run)
                    if known is not None and entry.run not in written and (fields := known.hash_fields(self._node)):
                        pipe.hset(keys.ranks, mapping=fields)
                        written[entry.run] = known.sealed_layout
                pipe.xadd(keys.frames, {"k": "n" if entry.is_frame else "m", "e": entry.data})
            answers = pipe.execute(raise_on_error=False)
        bad = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if bad is not None:
            raise bad
        del self._gone[: len(gone)]
        for run, layout in written.items():
            self._sent_runs[run].written_layout = layout
        self._note_ages(entries, answers)
        self.sent += len(entries)
        self.sent_bytes += sum(len(entry.data) for entry in entries)

    def _keep_up(self, now: float) -> None:
        """Write this node's presence, trim streams, and announce runs that Redis has lost."""
        if now - self._presence_at < PRESENCE_SECONDS:
            return
        self._presence_at = now
        runs = [run for run, known in list(self._sent_runs.items()) if known.hellos]
        about = {
            "node": self._node, "pid": os.getpid(), "version": __version__, "wire_version": wire.WIRE_VERSION,
            "time_unix": time.time(), "started_unix": self._since_unix, "host": socket.gethostname(), "runs": runs,
            "namesake": self._look_around(runs),
            "ranks": sum(len(known.hellos) for known in self._sent_runs.values()),
            "spool_bytes": self._spool.size_bytes, "dropped": self.dropped, "metrics_url": self._metrics_url,
            **self._keys,
        }  # fmt: skip
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(redis_keys.NODES, self._node, json.dumps(about))
            for run in runs:
                pipe.sadd(redis_keys.ACTIVE, run)
                pipe.set(RunKeys(run).presence(self._node), "1", px=PRESENCE_TTL_MS)
                pipe.exists(RunKeys(run).ranks)
            answers = pipe.execute()
        for position, run in enumerate(runs):
            if not answers[3 + 3 * position]:
                logger.warning("redis at %s has lost run %s; announcing it again", self._link.shown, run)
                self._on_error("data_lost")
                self.send(AnnounceAgain(run))
        if now - self._trim_at >= TRIM_SECONDS:
            self._trim_at = now
            # Each agent trims, so that streams stay bounded without a controller.
            self._trim(runs, self._keep_seconds)

    def _look_around(self, runs: list[str]) -> str:
        """Cancel the expiry that an earlier end set on the keys of these runs. Returns another agent that uses this
        node's name, or "". Redis ACLs of an earlier version deny both, which is logged once."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(redis_keys.NODES, self._node)
            for run in runs:
                for key in RunKeys(run).to_go_on:
                    pipe.persist(key)
            found, *others = pipe.execute(raise_on_error=False)
        for error in (found, *others):
            if isinstance(error, ResponseError) and reason_of(error) == "denied":
                self._say_once(
                    "denied",
                    f"redis at {self._link.shown}: {words_of(error)}: apply this version's docs/redis-acl.conf",
                )
            elif isinstance(error, Exception):
                raise error
        other = self._namesake.look(found if isinstance(found, bytes) else None)
        if other:
            self._on_error("node_name_taken")
            self._say_once(
                other,
                f"another agent is alive under the name of this node, {self._node}: {other}. Of a run on both, "
                "controllers hear only the agent that was started last: give each its own name (FP8WATCH_NODE)",
            )
        return other

    def _say_once(self, what: str, words: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s", words)

    def _note_ages(self, entries: list[Entry], answers: list[Any]) -> None:
        """Record the entry IDs: XADD returns an ID, the other commands a number."""
        names = [answer.decode() for answer in answers if isinstance(answer, bytes)]
        for entry, name in zip(entries, names, strict=False):
            if (known := self._sent_runs.get(entry.run)) is not None:
                known.ages.sent(name)

    def _trim(self, runs: list[str], keep_seconds: float) -> None:
        redis_seconds = self._redis.time()[0]
        for run in runs:
            ages = self._sent_runs.get(run, SentRun()).ages
            oldest = ages.oldest_kept(keep_seconds, redis_seconds)
            self._redis.xtrim(RunKeys(run).frames, minid=oldest, approximate=True)

    def _failed(self, error: Exception) -> None:
        reason = reason_of(error)
        self._on_error(reason)
        self._retry_at = time.monotonic() + self._retry_seconds * random.uniform(0.5, 1.0)
        self._retry_seconds = min(self._retry_seconds * 2, MAX_RETRY_SECONDS)
        if not self.is_away:
            self.is_away, self._away_since = True, time.monotonic()
            logger.warning("redis at %s: %s (%s); frames go to the spool", self._link.shown, reason, words_of(error))
        if reason in ("read_only", "timeout"):
            self._link.reset()
        elif reason == "out_of_memory":
            self._make_room()

    def _make_room(self) -> None:
        """When Redis is out of memory, XTRIM still works: keep half the retention time."""
        try:
            self._trim(list(self._sent_runs), self._keep_seconds / 2)
        except (RedisError, OSError) as error:
            logger.debug("redis is out of memory, and its streams could not be trimmed: %s", error)
