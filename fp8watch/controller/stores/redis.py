"""The cluster's store: Redis behind the same few methods as SQLite, read by console and command line.

Frames lie in a stream and are trimmed by age. Everything else is durable: a hash by identity and a sorted set that
keeps the order of first writing, for each kind of record. The active controller does not write through `append` but
puts the same commands (`writes`) into its fenced commit, together with what it sends and what it has read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster import node_frames
from fp8watch.controller.cluster.redis_keys import RUNS, RunKeys
from fp8watch.controller.cluster.redis_link import RedisLink, connect
from fp8watch.controller.identity import KINDS, key_of, step_of
from fp8watch.controller.stores.base import Approval, R, unpack_approval
from fp8watch.errors import WireError
from fp8watch.records import Layout, NodeFrame, RunRecord, StepFrame, Stored
from fp8watch.security.envelope import Opener, unpack

CHUNK = 256
"""Records asked for at once: a pipeline never holds more."""
FRAME_CHUNK = 64
"""Stream entries asked for at once, about 3 MB of frames of 1,680 tensors."""

Write = tuple[Any, ...]
"""One Redis command with its arguments."""


class RedisStore:
    """A store in Redis. Raises `redis.RedisError` when it cannot be reached.

    `keep_seconds`: age at which `prune` takes frames out of the stream.
    """

    def __init__(self, link: RedisLink | str, *, keep_seconds: float = 600.0) -> None:
        self.link = connect(link) if isinstance(link, str) else link
        self._redis = self.link.client
        self.keep_seconds = keep_seconds

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first. A damaged record is left out."""
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
        """Keep records in one transaction; nothing is written when it fails."""
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
        """The Redis commands that keep these records; all their keys lie in the run's slot."""
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
                # NX: a record that replaces another keeps its place.
                writes.append(("ZADD", keys.kind_order(kind), "NX", order, key))
        return writes

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """Records of one kind; frames as far back as the stream goes. A damaged body is left out."""
        source = self._frames(run) if kind is StepFrame else self._records(run, KINDS[kind])
        if kind is RunRecord:
            source = (record for record in self.runs() if record.run == run)
        for record in source:
            step = step_of(record)
            inside = step is None or (step >= first_step and (last_step is None or step <= last_step))
            if inside and isinstance(record, kind):
                yield record

    def node_frames(self, run: str) -> Iterator[tuple[str, NodeFrame]]:
        """(entry of the stream, nodes' frames) as the controller took them in, as far back as the stream goes: what
        was there before or is of another run is left out. Who sent them is not verified: no key is at hand."""
        opener, position = Opener(None), "-"
        while entries := self._redis.xrange(RunKeys(run).frames, min=position, count=FRAME_CHUNK):
            position = f"({entries[-1][0].decode()}"
            for entry_id, fields in entries:
                if (frame := _node_frame(opener, fields)) is not None and frame.run == run:
                    yield entry_id.decode(), frame

    def layouts(self, run: str, attempt: int) -> list[Layout]:
        """All layouts of one attempt."""
        return [layout for layout in self.read(run, Layout) if layout.attempt == attempt]

    def approve(self, approval: Approval) -> None:
        """Keep a verdict."""
        self._redis.hset(RunKeys(approval.run).approvals, approval.action_id, wire.pack(approval))

    def approvals(self, run: str) -> list[Approval]:
        """The newest verdict on every action that has one. One that cannot be read counts as none."""
        found = []
        for body in self._redis.hvals(RunKeys(run).approvals):
            with contextlib.suppress(WireError):
                found.append(unpack_approval(body))
        return found

    def prune(self, run: str) -> int:
        """Take frames older than `keep_seconds` out of the stream, by the server's clock; how many entries went."""
        seconds, _ = self._redis.time()
        oldest = max(0, int(seconds * 1000 - self.keep_seconds * 1000))
        return int(self._redis.xtrim(RunKeys(run).frames, minid=f"{oldest}-0", approximate=True))

    def close(self) -> None:
        """Let go of the connections."""
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
        position = "-"
        while entries := self._redis.xrange(RunKeys(run).frames, min=position, count=FRAME_CHUNK):
            position = f"({entries[-1][0].decode()}"
            for _, fields in entries:
                for frame in frames_of(fields):
                    key = (frame.attempt, frame.rank, frame.step)
                    if key not in seen:  # an agent sends again what it is not sure of
                        seen.add(key)
                        yield frame


def frames_of(fields: dict[bytes, bytes]) -> list[StepFrame]:
    """The ranks' frames in a stream entry; none for other messages and for what cannot be read."""
    try:
        if (body := fields.get(b"b")) is not None:
            record = wire.unpack_stored(body)
            return [record] if isinstance(record, StepFrame) else []
        if fields.get(b"k") != b"n":
            return []
        node = wire.unpack_uplink(unpack(fields[b"e"]).body)
        return node_frames.expand(node) if isinstance(node, NodeFrame) else []
    except (WireError, KeyError):
        return []


def _node_frame(opener: Opener, fields: dict[bytes, bytes]) -> NodeFrame | None:
    try:
        # Entries of any kind are numbered together: those of other messages are opened for their number.
        message = wire.unpack_uplink(opener.open(unpack(fields[b"e"])))
    except (WireError, KeyError):
        return None
    return message if isinstance(message, NodeFrame) else None


def _decoded(body: bytes) -> Iterator[Stored]:
    with contextlib.suppress(WireError):
        yield wire.unpack_stored(body)
