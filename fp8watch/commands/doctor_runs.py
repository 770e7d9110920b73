"""The part of `fp8watch doctor --cluster` that asks whether several nodes train under one name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fp8watch.commands.checks import Check, problem

if TYPE_CHECKING:
    from fp8watch.controller.cluster.redis_link import RedisLink


def contested(link: RedisLink) -> list[Check]:
    """A problem for each node whose part of a run is refused, because another node holds the run. Raises
    `redis.RedisError`."""
    from fp8watch.controller.cluster.contest import decode, words
    from fp8watch.controller.cluster.redis_keys import NODES, RunKeys

    found = []
    for name, body in sorted(link.client.hgetall(NODES).items()):
        node = name.decode(errors="replace")
        for run in _runs(body):
            contest = decode(link.client.get(RunKeys(run).contested(node)))
            if contest is not None:
                found.append(problem(f"run {run}", words(run, node, contest)))
    return found


def _runs(body: bytes) -> list[str]:
    try:
        about: Any = json.loads(body)
        return sorted({run for run in about["runs"] if isinstance(run, str)})
    except (ValueError, KeyError, TypeError):  # `fp8watch.commands.doctor_cluster` says that it cannot be read
        return []
