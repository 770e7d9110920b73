"""How a controller starts to decide for a run: from where another one stopped, or from what the ranks have said.

The stream may have been trimmed since: what every rank said last of itself, and each node of its tensors, is kept
beside it (`RunKeys.ranks`), and compared with what is known here.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import msgspec

from fp8watch.controller.cluster.inflow import Entered, Inflow
from fp8watch.controller.cluster.outbox import Outbox
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.cluster.redis_link import ResponseError
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Hello, Layout, RankLost
from fp8watch.security import Signer

logger = logging.getLogger(__name__)
MEMORY_PARTS = ("memory", "last_id", "numbers", "nodes", "unfinished")
"""Fields of a run's state in Redis."""
_nodes = msgspec.msgpack.Decoder(dict[int, str])
_numbers = msgspec.msgpack.Decoder(dict[str, tuple[int, int]])
_unfinished = msgspec.msgpack.Decoder(list[tuple[str, int, int]])


class Takeover:
    """Methods raise `redis.RedisError` when Redis does not answer. `errors`: reason -> number of failures."""

    def __init__(
        self, store: RedisStore, outbox: Outbox, inflow: Inflow, runs: ClusterController, signer: Signer,
        errors: Counter[str],
    ) -> None:  # fmt: skip
        self._store, self._outbox, self._inflow, self._runs = store, outbox, inflow, runs
        self._redis: Any = store.link.client
        self._signer = signer
        self._errors = errors

    def join(self, run: str, *, may_use_memory: bool = True) -> list[Entered]:
        """Start to decide for a run. Returns the entries that another controller had read and not finished."""
        self._outbox.claim(run)
        self._outbox.revive(run)
        memory, last_id, numbers, nodes, unfinished = self._recall(run)
        if nodes is not None:
            self._runs.nodes[run] = _nodes.decode(nodes)
        if memory is not None and may_use_memory:
            self._adopt(run, memory)
        if self._runs.pilot(run) is None:
            self._greet(run)
        elif nodes is None:
            self._learn_nodes(run)
        known = _numbers.decode(numbers) if numbers else {}
        open_ones = _unfinished.decode(unfinished) if unfinished else []
        entries = self._inflow.join(run, last_id.decode() if last_id else "0-0", known, open_ones)
        pilot = self._runs.pilot(run)
        logger.info(
            "run %s: from step %s, %d entries to process again", run, pilot.step if pilot else "?", len(entries)
        )
        missed = self.missed(run, has_joined=True)
        is_of_now = all(isinstance(item.message, Layout) for item in missed)  # what is open may need it
        return [*missed, *entries] if is_of_now else [*entries, *missed]

    def missed(self, run: str, *, has_joined: bool = False) -> list[Entered]:
        """What the ranks have said and this controller has not heard, although it is not in the stream any more:
        hellos and layouts of agents that live, and, where it `has_joined` just now, that ranks are gone."""
        said = self._said(run)
        pilot = self._runs.pilot(run)
        ranks = pilot.ranks if pilot is not None else {}
        news: list[Entered] = []
        if has_joined and said:
            here = {(item.message.rank, item.node) for item in said if isinstance(item.message, Hello)}
            held = self._runs.nodes.get(run, {})
            for rank, node in [(rank, held[rank]) for rank in ranks if rank in held]:
                if (rank, node) not in here:
                    news.append(Entered(run, "", RankLost(run=run, rank=rank, node=node), node))
        said = self._of_living(run, said)
        hellos = [
            item for item in said
            if isinstance(item.message, Hello) and not _is_known(ranks.get(item.message.rank), item.message)
        ]  # fmt: skip
        begun = {item.node for item in hellos}
        layouts = [
            item for item in said
            if isinstance(item.message, Layout)
            and (item.node in begun or (pilot is not None and not pilot.knows(item.message)))
        ]  # fmt: skip
        news += [*hellos, *layouts]
        ahead = self._ahead(run, {item.node for item in news})
        news = [item for item in news if _is_trimmed(item, ahead.get(item.node))]
        if heard := [item for item in news if item.message and not self._runs.refusal(item.message, item.node)]:
            shown = ", ".join(f"{_WORDS[type(item.message)]} of {item.node}" for item in heard[:8])
            logger.warning("run %s: no longer in the stream, so read from the run's hash of ranks: %s", run, shown)
        return news

    def _of_living(self, run: str, said: list[Entered]) -> list[Entered]:
        """Without what agents have left behind that are gone."""
        nodes = sorted({item.node for item in said})
        with self._redis.pipeline(transaction=False) as pipe:
            for node in nodes:
                pipe.exists(RunKeys(run).presence(node))
            living = {node for node, here in zip(nodes, pipe.execute(), strict=True) if here}
        return [item for item in said if item.node in living]

    def is_abandoned(self, run: str) -> bool:
        """Whether nothing is kept of any rank of the run, and all that was sent of it was read."""
        return not self._redis.hvals(RunKeys(run).ranks) and not self._inflow.lag(run)

    def _ahead(self, run: str, nodes: set[str]) -> dict[str, tuple[int, int]]:
        if not nodes:
            return {}
        try:
            return self._inflow.ahead(run, nodes)
        except ResponseError as error:  # not allowed by an older ACL: better heard twice than never
            logger.warning(
                "run %s: entries still to come cannot be read (%s), so some may be processed twice", run, error
            )
            return {}

    def _recall(self, run: str) -> list[bytes | None]:
        """The state that the last controller left of a run; all None if any part was not signed by a controller."""
        left = self._redis.hmget(RunKeys(run).state, *MEMORY_PARTS)
        try:
            return [
                None if data is None else self._signer.recalled(run, name, data)
                for name, data in zip(MEMORY_PARTS, left, strict=True)
            ]
        except ValueError as error:
            self._errors["forged"] += 1
            logger.warning("%s: the stored memory is not used", error)
            return [None] * len(MEMORY_PARTS)

    def _adopt(self, run: str, memory: bytes) -> None:
        layouts = list(self._store.read(run, Layout))
        try:
            self._runs.adopt(run, memory, layouts)
        except Exception as error:  # whatever it is, the run can be started without
            level = logging.WARNING if isinstance(error, ValueError) else logging.ERROR
            logger.log(level, "run %s: the memory of the last controller cannot be used: %s", run, error)

    def _greet(self, run: str) -> None:
        """Start a run without a memory, from the ranks' hellos and the stored layouts."""
        hellos = self._hellos(run)
        for hello, node in hellos:
            if not self._runs.refusal(hello, node):
                self._outbox.command(run, self._runs.take(hello, node=node))
        if hellos:
            self._runs.know_layouts(run, list(self._store.read(run, Layout)))

    def _learn_nodes(self, run: str) -> None:
        """A memory of an earlier version does not tell which node holds which rank."""
        for hello, node in reversed(self._hellos(run)):
            self._runs.nodes[run][hello.rank] = node

    def _hellos(self, run: str) -> list[tuple[Hello, str]]:
        """The newest hello of each rank and node, with the node: the lowest rank first, of one rank the oldest."""
        return [(item.message, item.node) for item in self._said(run) if isinstance(item.message, Hello)]

    def _said(self, run: str) -> list[Entered]:
        """The genuine ones of what is kept beside the stream: hellos as `_hellos`, then layouts."""
        found = [item for data in self._redis.hvals(RunKeys(run).ranks) if (item := self._inflow.peek(run, data))]
        return sorted(found, key=lambda item: _place(item.message))


_WORDS: dict[object, str] = {Hello: "hello", Layout: "layout", RankLost: "end"}


def _place(message: object) -> tuple[bool, int, float]:
    is_hello = isinstance(message, Hello)
    return (not is_hello, getattr(message, "rank", 0), getattr(message, "time_unix", 0.0))


def _is_known(known: Hello | None, hello: Hello) -> bool:
    """Whether both are of one attempt of the same process."""
    return known is not None and _process(known) == _process(hello)


def _process(hello: Hello) -> tuple[str, int, int, str]:
    return hello.start, hello.attempt, hello.pid, hello.host


def _is_trimmed(item: Entered, first_ahead: tuple[int, int] | None) -> bool:
    """Whether a message is not in the stream any more: its sender's entries come in the order of their numbers."""
    if isinstance(item.message, RankLost):
        return first_ahead is None
    return first_ahead is None or item.number < first_ahead
