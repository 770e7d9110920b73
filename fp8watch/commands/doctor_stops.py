"""The part of `fp8watch doctor --cluster` that says where acting was stopped: on purpose perhaps, or forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8watch.commands.checks import Check, warning

if TYPE_CHECKING:
    from fp8watch.controller.cluster.redis_link import RedisLink

CHUNK = 256


def checks(link: RedisLink) -> list[Check]:
    """A warning if nothing may act, and one for each run under way in which nothing may. Raises `redis.RedisError`."""
    from fp8watch.controller.cluster.redis_keys import ACTIVE, DISARM, RunKeys

    found = []
    if link.client.get(DISARM) is not None:
        why = f"{DISARM} is set: no action is taken in any run, until `fp8watch disarm --all --undo`"
        found.append(warning("disarmed", why))
    runs = sorted(name.decode(errors="replace") for name in link.client.smembers(ACTIVE))
    for start in range(0, len(runs), CHUNK):
        some = runs[start : start + CHUNK]
        with link.client.pipeline(transaction=False) as pipe:
            for run in some:
                pipe.get(RunKeys(run).disarm)
            answers = pipe.execute()
        for run, answer in zip(some, answers, strict=True):
            if answer is not None:
                why = f"disarmed: no action is taken in it, until `fp8watch disarm {run} --undo`"
                found.append(warning(f"run {run}", why))
    return found
