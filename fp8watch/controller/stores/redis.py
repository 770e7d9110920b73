"""The store of the cluster mode: Redis, with the same methods as SQLite. Console and command line read it.

Frames are in a stream, which is trimmed by age. Everything else is durable: for each kind of record a hash by identity
and a sorted set for the order of first writing. The active controller does not use `append`; it puts the same Redis
commands (`writes`) into its fenced commit, together with the messages it sends and acknowledges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster import node_frames
from fp8watch.controller.cluster.frame_holders import FrameHolders
from fp8watch.controller.cluster.redis_keys import RUNS, RunKeys
from fp8watch.controller.cluster.redis_link import RedisLink, connect
from fp8watch.controller.identity import KINDS, key_of
from fp8watch.controller.stores.base import Approval, R, is_within, unpack_approval
from fp8watch.errors import WireError
from fp8watch.records import Arrival, NodeFrame, RunRecord, StepFrame, Stored
from fp8watch.security.envelope import Opener, unpack

CHUNK = 256
"""Most records requested at once in a pipeline."""
FRAME_CHUNK = 64
"""Stream entries requested at once: about 3 MB for frames of 1,680 tensors."""

Write = tuple[Any, ...]
"""One Redis command with its arguments."""


class RedisStore:
    """A store in Redis. Methods raise `redis.RedisError` when Redis cannot be reached.

    `keep_seconds`: age from which on `prune` removes frames from the stream.
    """

    def __init__(self, link: RedisLink | str, *, keep_seconds: float = 600.0) -> None:
        self.link = connect(link) if isinstance(link, str) else link
        self._redis = self.link.client
        self.keep_seconds = keep_seconds

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first. Damaged records are skipped."""
        names = sorted(name.decode(errors="replace") for name in self._redis.smembers(RUNS))
        bodies: list[bytes | None] = []
        for start in range(0, len(names), CHUNK):
            with self._redis.pipeline(transaction=False) as pipe:
                for name in names[start : start + CHUNK]:
                    pipe.get(RunKeys(name).run)
                bodies += pipe.execute()
        found = [record for body in bodies if body is not None for record in _decoded(body)]
        return sorted((r for r in found if isinstance(r, RunRecord)), key=lambda record: record.started_unix)

    def append(self, run: str, records: Iterable[Stored]) -> None:
        """Add records in one transaction; if it fails, nothing is written."""
        kept = list(records)
        if not kept:
            return
        writes = self.writes(run, kept)
        if any(isinstance(record, RunRecord) for record in kept):
            self._redis.sadd(RUNS, run)
        with self._redis.pipeline(transaction=True) as pipe:
            for write in writes:
                pipe.execute_command(*write)
            pipe.execute()

    def writes(self, run: str, records: list[Stored]) -> list[Write]:
        """The Redis commands that store these records; all their keys are in the run's slot."""
        keys = RunKeys(run)
        plain = [r for r in records if not isinstance(r, StepFrame | RunRecord)]
        last = int(self._redis.incrby(keys.order, len(plain))) if plain else 0
        orders = iter(range(last - len(plain) + 1, last + 1))
        writes: list[Write] = []
        for record in records:
            if isinstance(record, RunRecord):
                writes.append(("SET", keys.run, wire.pack(record)))
            elif isinstance(record, StepFrame):
                writes.append(("XADD", keys.frames, "*", "b", wire.pack(record)))
            else:
                order, kind = next(orders), KINDS[type(record)]
                key = key_of(record)
                key = f"#{order}" if key is None else key
                writes.append(("HSET", keys.kind(kind), key, wire.pack(record)))
                # NX: a record that replaces another keeps its place in the order.
                writes.append(("ZADD", keys.kind_order(kind), "NX", order, key))
        return writes

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """Records of one kind; frames as far back as the stream goes. Damaged records are skipped."""
        source = self._frames(run) if kind is StepFrame else self._records(run, KINDS[kind])
        if kind is RunRecord:
            body = self._redis.get(RunKeys(run).run)
            source = iter(()) if body is None else _decoded(body)
        for record in source:
            if isinstance(record, kind) and is_within(record, first_step, last_step):
                yield record

    def node_frames(self, run: str) -> Iterator[tuple[str, NodeFrame]]:
        """(stream entry id, node frame) as the controller accepted them, as far back as the stream goes: repeated
        messages, those of other runs and of nodes that did not hold the rank are skipped. Signatures are not verified:
        a reader has no key."""
        opener, position, holders = Opener(None), "-", FrameHolders(self.read(run, Arrival))
        while entries := self._redis.xrange(RunKeys(run).frames, min=position, count=FRAME_CHUNK):
            position = f"({entries[-1][0].decode()}"
            for entry_id, fields in entries:
                frame, name = _node_frame(opener, fields), entry_id.decode()
                if frame is not None and frame.run == run and holders.is_held(name, frame):
                    yield name, frame

    def approve(self, approval: Approval) -> None:
        """Add a verdict."""
        self._redis.hset(RunKeys(approval.run).approvals, approval.action_id, wire.pack(approval))

    def approvals(self, run: str) -> list[Approval]:
        """The newest verdict on every action that has one. Unreadable verdicts are skipped."""
        found = []
        for body in self._redis.hvals(RunKeys(run).approvals):
            with contextlib.suppress(WireError):
                found.append(unpack_approval(body))
        return found

    def prune(self, run: str) -> int:
        """Remove frames older than `keep_seconds`, by the server's clock. Returns the number of entries removed."""
        seconds, _ = self._redis.time()
        oldest = max(0, int(seconds * 1000 - self.keep_seconds * 1000))
        return int(self._redis.xtrim(RunKeys(run).frames, minid=f"{oldest}-0", approximate=True))

    def close(self) -> None:
        """Close the connections."""
        self.link.close()

    def _records(self, run: str, kind: str) -> Iterator[Stored]:
        keys = RunKeys(run)
        start = 0
        while names := self._redis.zrange(keys.kind_order(kind), start, start + CHUNK - 1):
            start += len(names)
            for body in self._redis.hmget(keys.kind(kind), names):
                yield from () if body is None else _decoded(body)

    def _frames(self, run: str) -> Iterator[StepFrame]:
        seen: set[tuple[int, int, int]] = set()
        position, holders = "-", FrameHolders(self.read(run, Arrival))
        while entries := self._redis.xrange(RunKeys(run).frames, min=position, count=FRAME_CHUNK):
            position = f"({entries[-1][0].decode()}"
            for entry_id, fields in entries:
                for frame in frames_of(fields, partial(holders.is_held, entry_id.decode())):
                    key = (frame.attempt, frame.rank, frame.step)
                    if key not in seen:  # an agent sends a message again if it does not know whether it arrived
                        seen.add(key)
                        yield frame


def frames_of(fields: dict[bytes, bytes], is_wanted: Callable[[NodeFrame], bool] | None = None) -> list[StepFrame]:
    """The rank frames in a stream entry; empty for other or unreadable messages, and for unwanted ones."""
    try:
        if (body := fields.get(b"b")) is not None:
            record = wire.unpack_stored(body)
            return [record] if isinstance(record, StepFrame) else []
        if fields.get(b"k") != b"n":
            return []
        node = wire.unpack_uplink(unpack(fields[b"e"]).body)
        if not isinstance(node, NodeFrame) or not (is_wanted is None or is_wanted(node)):
            return []
        return node_frames.expand(node)
    except (WireError, KeyError):
        return []


def _node_frame(opener: Opener, fields: dict[bytes, bytes]) -> NodeFrame | None:
    try:
        # All kinds of messages share one sequence of numbers, so the others are opened too, for their number.
        message = wire.unpack_uplink(opener.open(unpack(fields[b"e"])))
    except (WireError, KeyError):
        return None
    return message if isinstance(message, NodeFrame) else None


def _decoded(body: bytes) -> Iterator[Stored]:
    with contextlib.suppress(WireError):
        yield wire.unpack_stored(body)
