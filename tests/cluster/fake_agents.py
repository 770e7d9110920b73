"""Agents as a controller sees them: sealed messages in a run's stream, without a process behind them."""

from __future__ import annotations

import time

import hand_made as make
import msgspec

from fp8watch import wire
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import ACTIVE, RunKeys
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import NodeFrame, Uplink
from fp8watch.security.envelope import Sealer

KEYS = RunKeys("r")
NODES = ("a", "b")


class Agents:
    """Two nodes of a rank each, of run `r`."""

    def __init__(self, store: RedisStore) -> None:
        self._redis = store.link.client
        self._sealers = {node: Sealer(node, 1, None) for node in NODES}
        self.attempt = 0

    def hello(self) -> None:
        """As an agent does: the run is active, its node present, its rank announced."""
        self._redis.sadd(ACTIVE, "r")
        for rank, node in enumerate(NODES):
            self._redis.set(KEYS.presence(node), "1")
            entry = self.put(node, make.hello("r", rank=rank, world_size=len(NODES), attempt=self.attempt))
            self._redis.hset(KEYS.ranks, f"{rank}@{node}", entry)

    def put(self, node: str, message: Uplink) -> bytes:
        entry = msgspec.msgpack.encode(self._sealers[node].seal(wire.pack(message)))
        self._redis.xadd(KEYS.frames, {"k": "n" if isinstance(message, NodeFrame) else "m", "e": entry})
        return entry

    def frame(self, node: str, step: int, loss: float = 2.0) -> None:
        rank = NODES.index(node)
        frame = NodeFrame(
            run="r", attempt=self.attempt, node=node, rank=rank, step=step, layout_id=1, time_unix=time.time(),
            ranks=[rank], scalars=[{"loss": loss, "grad_norm": 1.0}],
        )  # fmt: skip
        self.put(node, frame)

    def train(self, first: int, last: int, nan_at: int = 0) -> None:
        for step in range(first, last + 1):
            for node in NODES:
                self.frame(node, step, float("nan") if step == nan_at else 2.0)

    def end(self, message: type) -> None:
        """All ranks end, with a `Goodbye` or as a `RankLost`."""
        for rank, node in enumerate(NODES):
            more = {"step": 0} if message.__name__ == "Goodbye" else {"node": node}
            self.put(node, message(run="r", rank=rank, **more))


def rounds(program: ClusterProgram, count: int = 3) -> None:
    for _ in range(count):
        program._round()


def until(program: ClusterProgram, state: str) -> None:
    """Rounds until the run is in that state, and once more."""
    deadline = time.monotonic() + 10.0
    while (record := next(iter(program.store.runs()), None)) is None or record.state != state:
        assert time.monotonic() < deadline, record
        program._round()
