"""What comes in from agents: a consumer group over the runs' streams, entries opened, order and origin checked.

`Inflow.enter` is the one place where an agent's message enters the controller.

The group's list of what was read and not finished is what a successor begins with: an entry leaves it in the commit
that keeps its effect. Which entry was read last is kept besides, so that a group that has vanished (a server without
persistence, an eviction) is made anew from there: nothing acts twice and nothing that is still in the stream is missed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import GROUP, RunKeys
from fp8watch.controller.cluster.redis_link import BLOCK_MS, RedisLink, ResponseError
from fp8watch.errors import WireError
from fp8watch.records import Uplink
from fp8watch.security.envelope import Opener, Repeated, unpack
from fp8watch.security.keyring import KeyRing

logger = logging.getLogger(__name__)
READ_COUNT = 128
POLL_MS = 50
"""Between two looks at streams that cannot be read in one blocking call (Redis Cluster)."""
CLAIM_COUNT = 256


@dataclass(frozen=True, slots=True)
class Entered:
    """An entry of a run's stream. `message` None: it was refused."""

    run: str
    entry_id: str
    message: Uplink | None
    node: str = ""
    """Who sent it."""
    number: tuple[int, int] = (0, 0)
    """Incarnation and sequence of its envelope."""


class Inflow:
    """Reads for one consumer. Raises `redis.RedisError` when Redis is away."""

    def __init__(self, link: RedisLink, consumer: str, ring: KeyRing | None) -> None:
        self._link = link
        self._redis: Any = link.client
        self._consumer = consumer
        self._ring = ring
        self._openers: dict[str, Opener] = {}
        self._last_ids: dict[str, str] = {}
        self._is_unsure = False
        self.refused: Counter[tuple[str, str]] = Counter()
        """(run, reason) -> entries."""
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
        """Begin with a run; the entries that somebody read and did not finish, oldest first.

        `last_id`: the newest entry read by the last commit; `numbers`: what each agent had sent by then; `unfinished`:
        (sender, incarnation, sequence) of what was read by then and is still to be dealt with.
        """
        try:
            return self._join(run, last_id, numbers, unfinished)
        except BaseException:
            self.leave(run)  # to be joined again, from the same point
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
            # Two parts on 6.2, three from 7.0: only what both have is used.
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
        """Read a run no longer."""
        self._last_ids.pop(run, None)
        self._openers.pop(run, None)

    def leave_all(self) -> None:
        """Read nothing any more."""
        self._last_ids.clear()
        self._openers.clear()

    def last_id(self, run: str) -> str:
        """The newest entry read of a run."""
        return self._last_ids.get(run, "0-0")

    def numbers(self, run: str) -> dict[str, tuple[int, int]]:
        """What each agent has sent to a run so far."""
        opener = self._openers.get(run)
        return opener.numbers() if opener is not None else {}

    def read(self, block_ms: int = BLOCK_MS // 4) -> list[Entered]:
        """New entries of all runs; waits a little when there are none."""
        by_key = {RunKeys(run).frames.encode(): run for run in self._last_ids}
        found: list[Entered] = self._missed(by_key) if self._is_unsure else []
        if found:
            return found
        self._is_unsure = True  # until the answer is here: what was given out and not received is asked for again
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
        self._is_unsure = False
        if not found and (self._link.is_cluster or not keys):  # nothing that could have blocked
            time.sleep((POLL_MS if keys else block_ms) / 1000)
        return found

    def _missed(self, by_key: dict[bytes, str]) -> list[Entered]:
        """Entries that were given out to us in an answer that never arrived: later than the last that did."""
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
        """An entry with its message, or (counted) without."""
        name = entry_id.decode()
        if _number(name) > _number(self.last_id(run)):
            self._last_ids[run] = name
        try:
            envelope = unpack(fields[b"e"])
        except (KeyError, WireError) as error:
            return self._refuse(run, name, "malformed", error)
        try:
            body = self._openers[run].open(envelope)
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
            return self._refuse(run, name, "foreign", WireError(f"it speaks of run {message.run}"))
        self.taken[run] += 1
        return Entered(run, name, message, envelope.sender, (envelope.incarnation, envelope.sequence))

    def glance(self, data: bytes) -> tuple[Uplink, str] | None:
        """A sealed message that lies outside the stream, and its node; None: not genuine. Order is not looked at."""
        try:
            envelope = unpack(data)
            if envelope.wire_version not in wire.READABLE_VERSIONS:
                return None
            return wire.unpack_uplink(Opener(self._ring).open(envelope)), envelope.sender
        except WireError:
            return None

    def following(self) -> set[str]:
        """Runs that are read."""
        return set(self._last_ids)

    def lag(self, run: str) -> int | None:
        """Entries that wait to be read; None: unknown."""
        for group in self._redis.xinfo_groups(RunKeys(run).frames):
            if group["name"] == GROUP.encode():
                lag = group.get("lag")
                return int(lag) if lag is not None else None
        return None

    def _refuse(self, run: str, name: str, reason: str, error: Exception) -> Entered:
        self.refused[run, reason] += 1
        level = logging.WARNING if self.refused[run, reason] == 1 and reason != "repeated" else logging.DEBUG
        logger.log(level, "entry %s of run %s refused as %s: %s", name, run, reason, error)
        return Entered(run, name, None)

    def _make_group(self, run: str, *, is_gone: bool = False) -> None:
        try:
            self._redis.xgroup_create(RunKeys(run).frames, GROUP, id=self.last_id(run), mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
            return
        if is_gone:
            self.recreated[run] += 1
            logger.warning("the consumer group of run %s was gone: made anew after %s", run, self.last_id(run))

    def _tidy(self, run: str) -> None:
        """Remove consumers of controllers that are gone, once nothing of theirs is left."""
        for consumer in self._redis.xinfo_consumers(RunKeys(run).frames, GROUP):
            name = consumer["name"].decode()
            if name != self._consumer and consumer["pending"] == 0:
                self._redis.xgroup_delconsumer(RunKeys(run).frames, GROUP, name)


def _number(entry_id: str) -> tuple[int, int]:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count or 0)
