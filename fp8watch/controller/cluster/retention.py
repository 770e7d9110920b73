"""Removes from Redis what nobody needs any more: the records of runs that ended long ago, and of agents long gone.

The active controller does it in small steps: a few names of runs a step, and of those too old a few at once. A run is
judged by when its record was last written, and never while an agent has ranks of it.
"""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Callable, Set
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import ACTIVE, NODES, RUNS, RunKeys
from fp8watch.controller.cluster.redis_link import ResponseError
from fp8watch.controller.identity import KINDS
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.errors import WireError
from fp8watch.records import RunRecord

logger = logging.getLogger(__name__)
DAY = 86_400.0
STEP_SECONDS = 5.0
"""Between two steps."""
NAMES = 64
"""Names asked for in a step; Redis may give more."""
REMOVED = 8
"""Most runs that are removed in a step."""
GONE_DAYS = 7.0
"""How long an agent may be silent before it is no longer listed."""


class Retention:
    """`keep_days` after its end a run goes, and earlier the oldest of more than `keep_runs`. `clock` is monotonic, in
    seconds. Raises `redis.RedisError` when Redis does not answer."""

    def __init__(self, store: RedisStore, *, keep_days: float, keep_runs: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._redis: Any = store.link.client
        self._keep_seconds = keep_days * DAY
        self._keep_runs = keep_runs
        self._clock = clock
        self._stepped_at = clock()
        self._cursor: dict[str, int] = {RUNS: 0, NODES: 0}
        self._written: dict[str, float] = {}
        """Runs seen since the names were last begun -> when the record was last written (Unix time)."""
        self._due: list[str] = []
        self._is_denied = False
        self.removed = 0
        """Runs removed by this process."""

    def step(self, busy: Set[str]) -> None:
        """Do a little, if it is time; `busy`: runs that are being decided for or that an agent has ranks of."""
        now = self._clock()
        if now - self._stepped_at < STEP_SECONDS:
            return
        self._stepped_at = now
        try:
            self._step(busy)
        except ResponseError as error:
            if not self._is_denied:
                self._is_denied = True
                logger.warning(
                    "what is left of old runs cannot be removed: %s: apply this version's docs/redis-acl.conf", error
                )

    def _step(self, busy: Set[str]) -> None:
        redis_seconds = float(self._redis.time()[0])
        if not self._due:
            self._look_for_runs(redis_seconds)
        some, self._due = self._due[:REMOVED], self._due[REMOVED:]
        for run in some:
            if run not in busy and not self._redis.sismember(ACTIVE, run):
                self._remove(run)
        self._forget_agents(redis_seconds)

    def _look_for_runs(self, redis_seconds: float) -> None:
        if self._cursor[RUNS] == 0:
            self._written.clear()
        self._cursor[RUNS], found = self._redis.sscan(RUNS, self._cursor[RUNS], count=NAMES)
        names = [name.decode(errors="replace") for name in found]
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.get(RunKeys(name).run)
            bodies = pipe.execute()
        for name, body in zip(names, bodies, strict=True):
            record = _record(body)
            self._written[name] = 0.0 if record is None else record.updated_unix  # 0: nothing is left of it
        old = {name for name in names if self._written[name] < redis_seconds - self._keep_seconds}
        too_many = len(self._written) - self._keep_runs
        if self._cursor[RUNS] == 0 and too_many > 0:
            old.update(heapq.nsmallest(too_many, self._written, key=self._written.__getitem__))
        self._due = sorted(old, key=self._written.__getitem__)

    def _remove(self, run: str) -> None:
        """The name goes last: what is interrupted is found again. What a run needs to go on expires by itself."""
        keys = RunKeys(run)
        kinds = [kind for kind in KINDS.values() if kind not in ("run", "frame")]
        records = [name for kind in kinds for name in (keys.kind(kind), keys.kind_order(kind))]
        with self._redis.pipeline(transaction=False) as pipe:
            for key in (*records, keys.run, keys.order, keys.approvals):
                pipe.unlink(key)
            for key in keys.to_go_on:
                pipe.expire(key, int(self._store.keep_seconds))
            pipe.execute()
        self._redis.srem(RUNS, run)
        self.removed += 1
        self._written.pop(run, None)
        logger.info("run %s ended long ago: its records are removed", run)

    def _forget_agents(self, redis_seconds: float) -> None:
        self._cursor[NODES], found = self._redis.hscan(NODES, self._cursor[NODES], count=NAMES)
        gone = [node for node, body in found.items() if redis_seconds - _heard(body, redis_seconds) > GONE_DAYS * DAY]
        if gone:
            self._redis.hdel(NODES, *gone)
            logger.info("%d agents not heard of for %g days are no longer listed", len(gone), GONE_DAYS)


def _record(body: bytes | None) -> RunRecord | None:
    if body is None:
        return None
    try:
        record = wire.unpack_stored(body)
    except WireError:
        return None
    return record if isinstance(record, RunRecord) else None


def _heard(body: bytes, default: float) -> float:
    """When an agent was last heard of; what cannot be read is left for `fp8watch doctor --cluster` to report."""
    try:
        return float(json.loads(body)["time_unix"])
    except (ValueError, KeyError, TypeError):
        return default
