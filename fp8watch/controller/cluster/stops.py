"""A person's word that nothing may act, in all runs (`redis_keys.DISARM`) or in one (`RunKeys.disarm`)."""

from __future__ import annotations

from typing import Any

from fp8watch.controller.cluster.redis_keys import DISARM, RunKeys
from fp8watch.controller.cluster.redis_link import RedisLink


class Stops:
    """As of the last `read`, which raises `redis.RedisError` when Redis does not answer."""

    def __init__(self, link: RedisLink) -> None:
        self._redis: Any = link.client
        self._why: dict[str, str] = {}

    def read(self, runs: set[str]) -> None:
        """Ask for these runs."""
        names = sorted(runs)
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.exists(DISARM)
            for run in names:
                pipe.exists(RunKeys(run).disarm)
            all_runs, *single = pipe.execute()
        everywhere = f"disarmed by {DISARM}" if all_runs else ""
        self._why = {
            run: everywhere or (f"disarmed by {RunKeys(run).disarm}" if found else "")
            for run, found in zip(names, single, strict=True)
        }

    def why(self, run: str) -> str:
        """Why nothing may act in this run; empty: nobody said so."""
        return self._why.get(run, "")
