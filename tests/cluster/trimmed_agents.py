"""An agent whose stream is trimmed: what it said last stays beside it, as `fp8watch_agent.uplink` keeps it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import hand_made as make
import msgspec
import numpy as np

from fp8watch import wire
from fp8watch.columns import pack
from fp8watch.controller.cluster.redis_keys import ACTIVE, RunKeys
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import NodeFrame, Uplink
from fp8watch.security.envelope import Sealer

KEYS = RunKeys("r")
TENSORS = 6


class Agent:
    """A node with rank 0 of run `r`."""

    def __init__(self, store: RedisStore, node: str = "n0") -> None:
        self._redis = store.link.client
        self._node = node
        self._sealer = Sealer(node, 1, None)
        self.attempt = 0

    def begin(self, **more: object) -> None:
        """Hello and layout of the present attempt."""
        self._redis.sadd(ACTIVE, "r")
        self._redis.set(KEYS.presence(self._node), "1")
        entry = self.put(make.hello("r", attempt=self.attempt, **more))
        self._redis.hset(KEYS.ranks, f"0@{self._node}", entry)
        self._redis.hset(KEYS.ranks, f"layout@{self._node}", self.put(make.layout("r", attempt=self.attempt)))

    def train(self, first: int, last: int, nan_at: Sequence[int] = ()) -> None:
        """Steps with a loss that is well; at `nan_at` only the tensors' maxima tell that something is wrong."""
        for step in range(first, last + 1):
            amax = np.full(TENSORS, np.nan if step in nan_at else 1.0, dtype=np.float32)
            columns = {"amax": pack(amax, "f4"), "scale": pack(np.full(TENSORS, 448.0, dtype=np.float32), "f4")}
            scalars = [{"loss": 2.0 + 0.01 * (step % 7), "grad_norm": 1.0}]
            self.put(
                NodeFrame(
                    run="r", attempt=self.attempt, node=self._node, rank=0, step=step, layout_id=1,
                    time_unix=time.time(), ranks=[0], scalars=scalars, columns=columns,
                )
            )  # fmt: skip

    def put(self, message: Uplink) -> bytes:
        entry = msgspec.msgpack.encode(self._sealer.seal(wire.pack(message)))
        self._redis.xadd(KEYS.frames, {"k": "n" if isinstance(message, NodeFrame) else "m", "e": entry})
        return entry

    def trim(self, keep: int = 0) -> None:
        """What is older than the newest `keep` entries is gone."""
        self._redis.xtrim(KEYS.frames, maxlen=keep, approximate=False)
