"""A note in Redis that a node's part of a run is refused, because other nodes hold the run.

The active controller writes it while it refuses, and it expires by itself. The refused node's agent tells its ranks
and says hello again from time to time; `fp8watch doctor --cluster` names both nodes. It is not signed and nothing is
decided by it: which nodes a command is for is in the command, under its signature.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fp8watch.bounds import Name, Owner
from fp8watch.controller.cluster.holders import in_the_way
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.cluster.redis_link import RedisLink, ResponseError
from fp8watch.records import Hello

logger = logging.getLogger(__name__)
NOTE_MS = 30_000
"""A note that was not written again for this long is over."""
RENEW_SECONDS = 5.0
"""How often the controller writes it again, and the agent says hello again, while it lasts."""


class Contest(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node is refused."""

    holder: Name
    """A node that holds the run."""
    owner: Owner | None = None
    """User id of the run's processes there; None: its agent is of an earlier version."""
    refused_owner: Owner | None = None
    """User id of those that are refused."""


_decoder = msgspec.json.Decoder(Contest)


def encode(contest: Contest) -> bytes:
    """The note as JSON."""
    return msgspec.json.encode(contest)


def decode(data: bytes | None) -> Contest | None:
    """The inverse; None for no note, or for what is none."""
    try:
        return None if data is None else _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def words(run: str, node: str, contest: Contest) -> str:
    """The note as a sentence for who trains on the refused node, or looks after the cluster."""
    users = (contest.owner, contest.refused_owner)
    both = f" (user {users[0]} there, user {users[1]} here)" if None not in users and users[0] != users[1] else ""
    return (
        f"run {run} is trained on node {contest.holder}{both}: what trains under its name on node {node} is not "
        "watched and gets no commands as long as the other does not end; give it another name (FP8WATCH_RUN)"
    )


class Contests:
    """The notes of one controller. Methods raise `redis.RedisError` when Redis does not answer. `clock` is monotonic,
    in seconds."""

    def __init__(self, link: RedisLink, clock: Callable[[], float]) -> None:
        self._redis: Any = link.client
        self._clock = clock
        self._written: dict[tuple[str, str], float] = {}

    def refused(self, hello: Hello, node: str, ranks: Mapping[int, Hello], nodes: Mapping[int, str]) -> None:
        """A hello from `node` was refused: `ranks` and `nodes` say who holds the run."""
        now, key = self._clock(), (hello.run, node)
        holder, before = in_the_way(hello, node, ranks, nodes), self._written.get(key)
        if not holder or (before is not None and now - before < RENEW_SECONDS / 2):
            return
        owner = next((known.owner for known in ranks.values() if known.owner is not None), None)
        contest = Contest(holder=holder, owner=owner, refused_owner=hello.owner)
        if before is None:
            logger.warning("%s", words(hello.run, node, contest))
        self._written[key] = now
        with contextlib.suppress(ResponseError):
            self._redis.set(RunKeys(hello.run).contested(node), encode(contest), px=NOTE_MS)

    def admitted(self, run: str, node: str) -> None:
        """A node holds a rank of the run now."""
        if self._written.pop((run, node), None) is not None:
            logger.info("run %s: node %s is admitted now", run, node)
            with contextlib.suppress(ResponseError):
                self._redis.delete(RunKeys(run).contested(node))

    def clear(self) -> None:
        """Another controller decides now."""
        self._written.clear()
