"""Reads the agents' messages: a consumer group on the runs' streams, which checks order and origin of each entry.

`Inflow.enter` is the only place where an agent's message enters the controller.

A successor starts with the group's pending entries: an entry is acknowledged in the same commit that stores its effect.
The id of the last entry read is stored too, so that a group that has vanished (a server without persistence, an
eviction) is recreated from there: no entry acts twice, and none that is still in the stream is missed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import GROUP, RunKeys
from fp8watch.controller.cluster.redis_link import BLOCK_MS, RedisLink, ResponseError
from fp8watch.errors import WireError
from fp8watch.records import Uplink
from fp8watch.security.envelope import Opener, Repeated, Superseded, unpack
from fp8watch.security.keyring import KeyRing

logger = logging.getLogger(__name__)
READ_COUNT = 128
POLL_MS = 50
"""Pause between two reads of streams that cannot be read in one blocking call (Redis Cluster)."""
CLAIM_COUNT = 256
SECOND_AGENT_SAID_AT = 3
LOOK_AHEAD = 1024
"""Some 33 MB of frames of 1,680 tensors."""


@dataclass(frozen=True, slots=True)
class Entered:
    """An entry of a run's stream. `message` is None if it was refused."""

    run: str
    entry_id: str
    message: Uplink | None
    node: str = ""
    """The node that sent it."""
    number: tuple[int, int] = (0, 0)
    """Incarnation and sequence of its envelope."""


class Inflow:
    """Reads as one consumer. Methods raise `redis.RedisError` when Redis does not answer."""

    def __init__(self, link: RedisLink, consumer: str, ring: KeyRing | None) -> None:
        self._link = link
        self._redis: Any = link.client
        self._consumer = consumer
        self._ring = ring
        self._openers: dict[str, Opener] = {}
        self._last_ids: dict[str, str] = {}
        self._may_have_missed = False
        self.refused: Counter[tuple[str, str]] = Counter()
        """(run, reason) -> number of entries."""
        self.taken: Counter[str] = Counter()
        self.claimed: Counter[str] = Counter()
        self.recreated: Counter[str] = Counter()

    def join(
        self,
        run: str,
        last_id: str,
        numbers: dict[str, tuple[int, int]],
        unfinished: Iterable[tuple[str, int, int]] = (),
    ) -> list[Entered]:
        """Start reading a run. Returns the pending entries of any consumer, oldest first.

        As of the last commit: `last_id` is the newest entry read, `numbers` the newest (incarnation, sequence) of each
        agent, `unfinished` the (sender, incarnation, sequence) of the messages that were read but not yet processed.
        """
        try:
            return self._join(run, last_id, numbers, unfinished)
        except BaseException:
            self.leave(run)  # so that it can be joined again from the same point
            raise

    def _join(
        self,
        run: str,
        last_id: str,
        numbers: dict[str, tuple[int, int]],
        unfinished: Iterable[tuple[str, int, int]],
    ) -> list[Entered]:
        self._last_ids[run] = last_id
        self._openers[run] = Opener(self._ring)
        self._openers[run].resume(numbers, unfinished)
        self._make_group(run)
        found: list[Entered] = []
        start = "0-0"
        while True:
            # Redis 6.2 answers with two parts, 7.0 with three: only the first two are used.
            answer = self._redis.xautoclaim(
                RunKeys(run).frames, GROUP, self._consumer, min_idle_time=0, start_id=start, count=CLAIM_COUNT
            )
            start, entries = answer[0].decode(), answer[1]
            found += [self.enter(run, entry_id, fields) for entry_id, fields in entries if fields]
            if start == "0-0":
                break
        self.claimed[run] += len(found)
        self._tidy(run)
        return found

    def leave(self, run: str) -> None:
        """Stop reading a run."""
        self._last_ids.pop(run, None)
        self._openers.pop(run, None)

    def leave_all(self) -> None:
        """Stop reading all runs."""
        self._last_ids.clear()
        self._openers.clear()

    def last_id(self, run: str) -> str:
        """The newest entry read of a run."""
        return self._last_ids.get(run, "0-0")

    def numbers(self, run: str) -> dict[str, tuple[int, int]]:
        """The newest (incarnation, sequence) of each agent of a run."""
        opener = self._openers.get(run)
        return opener.numbers() if opener is not None else {}

    def read(self, block_ms: int = BLOCK_MS // 4) -> list[Entered]:
        """New entries of all runs; waits up to `block_ms` if there are none."""
        by_key = {RunKeys(run).frames.encode(): run for run in self._last_ids}
        found: list[Entered] = self._missed(by_key) if self._may_have_missed else []
        if found:
            return found
        self._may_have_missed = True  # until all answers have arrived: else entries delivered to us would stay unread
        keys = [[key] for key in by_key] if self._link.is_cluster else [list(by_key)] if by_key else []
        for some in keys:
            block = None if self._link.is_cluster else block_ms
            try:
                answer = self._redis.xreadgroup(
                    GROUP, self._consumer, {key: ">" for key in some}, count=READ_COUNT, block=block
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                for key in some:
                    self._make_group(by_key[key], is_gone=True)
                continue
            for key, entries in answer.items() if isinstance(answer, dict) else answer or []:
                found += [self.enter(by_key[key], entry_id, fields) for entry_id, fields in entries]
        self._may_have_missed = False
        if not found and (self._link.is_cluster or not keys):  # no call has blocked
            time.sleep((POLL_MS if keys else block_ms) / 1000)
        return found

    def _missed(self, by_key: dict[bytes, str]) -> list[Entered]:
        """Entries that Redis delivered to us in an answer that never arrived: pending, and newer than the last read."""
        found: list[Entered] = []
        for key, run in by_key.items():
            try:
                answer = self._redis.xreadgroup(GROUP, self._consumer, {key: self.last_id(run)}, count=READ_COUNT)
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                continue
            for _, entries in answer.items() if isinstance(answer, dict) else answer or []:
                found += [self.enter(run, entry_id, fields) for entry_id, fields in entries if fields]
            if found:
                break
        return found

    def enter(self, run: str, entry_id: bytes, fields: dict[bytes, bytes]) -> Entered:
        """An entry with its message, or without it if refused, which is counted."""
        name = entry_id.decode()
        if _sort_key(name) > _sort_key(self.last_id(run)):
            self._last_ids[run] = name
        try:
            envelope = unpack(fields[b"e"])
        except (KeyError, WireError) as error:
            return self._refuse(run, name, "malformed", error)
        try:
            body = self._openers[run].open(envelope)
        except Superseded as error:
            return self._refuse_second(run, name, envelope.sender, error)
        except Repeated as error:
            return self._refuse(run, name, "repeated", error)
        except WireError as error:
            return self._refuse(run, name, "forged", error)
        if envelope.wire_version not in wire.READABLE_VERSIONS:
            why = f"node {envelope.sender!r} speaks wire version {envelope.wire_version}: upgrade controllers first"
            return self._refuse(run, name, "version", WireError(why))
        try:
            message = wire.unpack_uplink(body)
        except WireError as error:
            return self._refuse(run, name, "malformed", error)
        if message.run != run:
            return self._refuse(run, name, "foreign", WireError(f"it is about run {message.run}"))
        self.taken[run] += 1
        return Entered(run, name, message, envelope.sender, (envelope.incarnation, envelope.sequence))

    def peek(self, run: str, data: bytes) -> Entered | None:
        """A sealed message of a run that is stored outside the stream, without an entry's id; None if not genuine. The
        order is not checked."""
        try:
            envelope = unpack(data)
            if envelope.wire_version not in wire.READABLE_VERSIONS:
                return None
            message = wire.unpack_uplink(Opener(self._ring).open(envelope))
        except WireError:
            return None
        number = (envelope.incarnation, envelope.sequence)
        return Entered(run, "", message, envelope.sender, number) if message.run == run else None

    def ahead(self, run: str, senders: Set[str]) -> dict[str, tuple[int, int]]:
        """Of these senders, those with entries that are still to be read, and the (incarnation, sequence) of the first:
        what has a smaller one is not in the stream any more. Looks at the next `LOOK_AHEAD` entries."""
        found: dict[str, tuple[int, int]] = {}
        position, left = self.last_id(run), LOOK_AHEAD
        while left > 0 and not senders <= found.keys():
            entries = self._redis.xrange(RunKeys(run).frames, min=f"({position}", count=READ_COUNT)
            for _, fields in entries:
                with contextlib.suppress(KeyError, WireError):
                    envelope = unpack(fields[b"e"])
                    found.setdefault(envelope.sender, (envelope.incarnation, envelope.sequence))
            if len(entries) < READ_COUNT:
                break
            position, left = entries[-1][0].decode(), left - len(entries)
        return found

    def following(self) -> set[str]:
        """The runs that are being read."""
        return set(self._last_ids)

    def lag(self, run: str) -> int | None:
        """Number of entries not yet read; None: unknown."""
        for group in self._redis.xinfo_groups(RunKeys(run).frames):
            if group["name"] == GROUP.encode():
                lag = group.get("lag")
                return int(lag) if lag is not None else None
        return None

    def _refuse(self, run: str, name: str, reason: str, error: Exception) -> Entered:
        self.refused[run, reason] += 1
        is_loud = self.refused[run, reason] == 1 and reason not in ("repeated", "second_agent")
        level = logging.WARNING if is_loud else logging.DEBUG
        logger.log(level, "entry %s of run %s refused as %s: %s", name, run, reason, error)
        return Entered(run, name, None)

    def _refuse_second(self, run: str, name: str, node: str, error: Exception) -> Entered:
        """One may still come from an agent that is just being replaced."""
        if self.refused[run, "second_agent"] + 1 == SECOND_AGENT_SAID_AT:
            logger.warning(
                "run %s: two agents send as node %s, and only the one that was started last is heard: what trains at "
                "the other is not watched. Give each its own name (FP8WATCH_NODE)", run, node,
            )  # fmt: skip
        return self._refuse(run, name, "second_agent", error)

    def _make_group(self, run: str, *, is_gone: bool = False) -> None:
        try:
            self._redis.xgroup_create(RunKeys(run).frames, GROUP, id=self.last_id(run), mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
            return
        if is_gone:
            self.recreated[run] += 1
            logger.warning("the consumer group of run %s had vanished: recreated after %s", run, self.last_id(run))

    def _tidy(self, run: str) -> None:
        """Remove the consumers of other controllers that have no pending entries."""
        for consumer in self._redis.xinfo_consumers(RunKeys(run).frames, GROUP):
            name = consumer["name"].decode()
            if name != self._consumer and consumer["pending"] == 0:
                self._redis.xgroup_delconsumer(RunKeys(run).frames, GROUP, name)


def _sort_key(entry_id: str) -> tuple[int, int]:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count or 0)
