"""`fp8watch controller`: one process decides for all runs of a cluster, others stand by.

A round: keep the lease, read what agents sent, decide, commit. What one round decides is on its way when its commit is
through, and not before. While Redis is away nothing is lost: what was decided waits in memory and is committed under
the same number when it is back.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fp8watch.controller.cluster import redis_keys
from fp8watch.controller.cluster.inflow import Entered, Inflow
from fp8watch.controller.cluster.lease import Lease
from fp8watch.controller.cluster.outbox import Fenced, Interrupted, Outbox
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.cluster.redis_link import RedisError, RedisLink, reason_of, words_of
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.open_findings import Open
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Goodbye, Hello, Layout, Mode, NodeFrame, RankLost, Stored
from fp8watch.security import KeyRing, Signer

logger = logging.getLogger(__name__)
REMEMBER_SECONDS = 1.0
"""How often the memory of a run is written while nothing happens: what a successor has to judge again at most."""
MEMORY_BYTES_A_SECOND = 4 * 1024**2
"""A large memory (1,680 tensors with windows of 1,024 updates: over 20 MB) is written less often, so that it takes no
more than this of the way to Redis."""
LOOK_SECONDS = 1.0
"""How often runs, nodes and people's verdicts are looked for."""
MISSING_LOOKS = 10
"""Looks in a row in which a node's agent was not there before its ranks are taken for lost."""
MEMORY_PARTS = ("memory", "last_id", "numbers", "nodes", "unfinished")
"""Fields of a run's state in Redis."""
STANDBY_SECONDS = 0.25
MAX_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class _Progress:
    """What is open of one run."""

    open_frames: deque[tuple[tuple[int, int], Entered]] = field(default_factory=deque)
    """((attempt, step), entry without its message) of frames whose step is not complete."""
    done: list[str] = field(default_factory=list)
    remembered_at: float = 0.0
    memory_bytes: int = 0
    is_dirty: bool = False
    nodes: dict[int, str] = field(default_factory=dict)
    """Rank -> node whose agent it said hello to."""
    missing: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    """Times that the run was asked whether it is over."""


class ClusterProgram:
    """Runs until `stop`. `clock` is monotonic."""

    def __init__(
        self,
        link: RedisLink,
        *,
        holder: str,
        lease_seconds: float = 3.0,
        keep_seconds: float = 600.0,
        max_mode: Mode = "auto",
        signer: Signer | None = None,
        frame_ring: KeyRing | None = None,
        approval_ring: KeyRing | None = None,
        listener: Callable[[Stored], None] | None = None,
        on_open: Callable[[str, Open], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self._redis: Any = link.client
        self._clock = clock
        self.lease = Lease(link, holder, lease_seconds, clock)
        self.store = RedisStore(link, keep_seconds=keep_seconds)
        self.outbox = Outbox(self.store)
        self.inflow = Inflow(link, holder, frame_ring)
        self.runs = ClusterController(
            self.outbox, clock=time.time, listener=listener, max_mode=max_mode, signer=signer,
            approval_ring=approval_ring, disarmed_by=self._why_disarmed, on_open=on_open,
        )  # fmt: skip
        self._signer = signer or Signer(None)
        self._progress: dict[str, _Progress] = defaultdict(_Progress)
        self._backlog: deque[Entered] = deque()
        """Entries that were read and not dealt with yet: Redis went away in the middle of them."""
        self._disarmed: dict[str, str] = {}
        self._stopping = threading.Event()
        self._looked_at = self._lag_at = 0.0
        self._is_away = False
        self.errors: Counter[str] = Counter()
        """Reason -> calls to Redis that failed."""
        self.takeovers = 0
        self.lags: dict[str, int] = {}
        self.delays: dict[str, float] = {}
        """Run -> seconds from the making of the newest frame to its judgement."""

    @property
    def is_active(self) -> bool:
        """Whether this process decides now."""
        return self.lease.is_held

    def stop(self) -> None:
        """End soon, giving the lease up; safe in a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Until `stop`."""
        retry_seconds = 0.1
        while not self._stopping.is_set():
            try:
                if not self._round():
                    self._stopping.wait(STANDBY_SECONDS)
            except Fenced as error:
                logger.warning("another controller decides (%s): standing by", error)
                self._step_down()
            except (RedisError, OSError, Interrupted) as error:
                self._failed(error.error if isinstance(error, Interrupted) else error)
                self._stopping.wait(retry_seconds * random.uniform(0.5, 1.0))
                retry_seconds = min(2 * retry_seconds, MAX_RETRY_SECONDS)
                continue
            if self._is_away:
                self._is_away = False
                logger.info("redis at %s answers again", self.link.shown)
            retry_seconds = 0.1
        try:
            for run in self.runs.names():
                self._commit(run)
            self.lease.release()
        except (Fenced, RedisError, OSError) as error:
            logger.warning("last words could not be written: %s", error)

    def _round(self) -> bool:
        """One round; False: somebody else is active."""
        if not self.lease.is_held or not self.lease.renew():
            held = self.lease.acquire()
            if held is None:
                if self.runs.names():
                    logger.warning("%s holds the lease now: standing by", self.lease.seen)
                    self._step_down()
                return False
            self._lead(held.term, is_unbroken=held.is_unbroken)
        now = self._clock()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look()
        self._take(self.inflow.read())
        return True

    # Taking over

    def _lead(self, term: int, *, is_unbroken: bool) -> None:
        self.takeovers += 1
        self.outbox.term = self.runs.least_term = term
        self._looked_at = 0.0
        if is_unbroken:
            # The lease had ended and nobody had come: what is known here is still all there is.
            logger.info("active again under term %d", term)
            for run in self.inflow.following():
                if not self.outbox.claim(run):
                    self._write_again(run)
            return
        self._step_down()
        logger.info("active under term %d", term)

    def _step_down(self) -> None:
        self.outbox.drop_all()
        self.inflow.leave_all()
        self.runs.drop_all()
        self._progress.clear()
        self._backlog.clear()

    def _join(self, run: str) -> None:
        """Begin to decide for a run, where another controller stopped if one did."""
        self.outbox.claim(run)
        self.outbox.revive(run)
        memory, last_id, numbers, nodes, unfinished = self._recall(run)
        progress = self._progress[run] = _Progress()
        if nodes is not None:
            progress.nodes = msgspec.msgpack.decode(nodes, type=dict[int, str])
        if memory is not None:
            try:
                self.runs.adopt(run, memory, list(self.store.read(run, Layout)))
            except ValueError as error:
                logger.warning("run %s: the memory of the last controller cannot be used: %s", run, error)
        if self.runs.pilot(run) is None:
            self._greet(run)
        known = msgspec.msgpack.decode(numbers, type=dict[str, tuple[int, int]]) if numbers else {}
        open_ones = msgspec.msgpack.decode(unfinished, type=list[tuple[str, int, int]]) if unfinished else []
        entries = self.inflow.join(run, last_id.decode() if last_id else "0-0", known, open_ones)
        pilot = self.runs.pilot(run)
        logger.info(
            "run %s: from step %s, %d entries to be judged again", run, pilot.step if pilot else "?", len(entries)
        )
        self._take(entries)

    def _recall(self, run: str) -> list[bytes | None]:
        """What the last controller left of a run; nothing when any of it is not a controller's."""
        left = self._redis.hmget(RunKeys(run).state, *MEMORY_PARTS)
        try:
            return [
                None if data is None else self._signer.recalled(run, name, data)
                for name, data in zip(MEMORY_PARTS, left, strict=True)
            ]
        except ValueError as error:
            self.errors["forged"] += 1
            logger.warning("%s: it is not used", error)
            return [None] * len(MEMORY_PARTS)

    def _greet(self, run: str) -> None:
        """Without a memory: what agents say of their ranks, and what the store holds."""
        hellos = []
        for data in self._redis.hvals(RunKeys(run).ranks):
            message, node = self.inflow.glance(data) or (None, "")
            if isinstance(message, Hello) and message.run == run:
                self._progress[run].nodes[message.rank] = node
                hellos.append(message)
        for hello in sorted(hellos, key=lambda item: item.rank):
            self.outbox.command(run, self.runs.take(hello))
        if hellos:
            self.runs.know_layouts(run, list(self.store.read(run, Layout)))

    # A round's work

    def _take(self, entries: list[Entered]) -> None:
        self._backlog.extend(entries)
        touched: dict[str, bool] = {}
        while self._backlog:
            self._keep_lease()
            entry = self._backlog[0]
            progress = self._progress[entry.run]
            progress.is_dirty = True
            touched.setdefault(entry.run, False)
            message = entry.message
            if isinstance(message, RankLost | Goodbye) and progress.nodes.get(message.rank, entry.node) != entry.node:
                # The rank has moved since, or somebody else's agent says so: only who holds a rank can lose it.
                self.inflow.refused[entry.run, "other_node"] += 1
                logger.warning("node %s does not hold rank %d of %s: not gone", entry.node, message.rank, entry.run)
                message = None
            if message is None:
                progress.done.append(entry.entry_id)
                self._backlog.popleft()
                continue
            if isinstance(message, Hello):
                progress.nodes[message.rank] = entry.node
            try:
                self.outbox.command(entry.run, self.runs.take(message, entry.entry_id))
            except Exception:
                # One message that cannot be dealt with must not keep all others from being so.
                self.runs.ignored["failed"] += 1
                logger.exception("message %s of run %s failed", entry.entry_id, entry.run)
            self._backlog.popleft()
            if isinstance(message, NodeFrame):
                progress.open_frames.append(((message.attempt, message.step), dataclasses.replace(entry, message=None)))
                self.delays[entry.run] = time.time() - message.time_unix
            else:
                progress.done.append(entry.entry_id)
        now = self._clock()
        for run in {*touched, *self.runs.names()}:
            progress = self._progress[run]
            pause = max(REMEMBER_SECONDS, progress.memory_bytes / MEMORY_BYTES_A_SECOND)
            if self.outbox.is_weighty(run) or (progress.is_dirty and now - progress.remembered_at >= pause):
                self._commit(run)
            elif self.outbox.is_waiting(run):
                self.outbox.commit(run, memory={}, done=[])

    def _commit(self, run: str) -> None:
        progress = self._progress[run]
        pilot = self.runs.pilot(run)
        still_open: deque[tuple[tuple[int, int], Entered]] = deque()
        for position, entry in progress.open_frames:
            if pilot is None or position <= pilot.closed:
                progress.done.append(entry.entry_id)
            else:
                still_open.append((position, entry))
        progress.open_frames = still_open
        remembered = self.runs.memory(run)
        memory = {
            "last_id": self.inflow.last_id(run).encode(),
            "numbers": msgspec.msgpack.encode(self.inflow.numbers(run)),
            "nodes": msgspec.msgpack.encode(progress.nodes),
            "unfinished": msgspec.msgpack.encode([(entry.node, *entry.number) for _, entry in still_open]),
        } | ({"memory": remembered} if remembered is not None else {})
        memory = {name: self._signer.memory(run, name, data) for name, data in memory.items()}
        progress.memory_bytes = len(remembered or b"")
        is_kept = self.outbox.commit(run, memory=memory, done=progress.done)
        progress.done = []
        progress.remembered_at, progress.is_dirty = self._clock(), False
        if not is_kept:
            self._write_again(run)

    def _write_again(self, run: str) -> None:
        """Redis has lost what it knew of a run: what is remembered here goes back."""
        logger.warning("redis at %s has lost run %s; writing again what is known here", self.link.shown, run)
        self.errors["data_lost"] += 1
        self.outbox.revive(run)
        self.outbox.append(run, self.runs.everything(run))
        self._commit(run)

    def _look(self) -> None:
        """What time alone brings about: new runs, nodes that are gone, verdicts, retention."""
        active = {name.decode(errors="replace") for name in self._redis.smembers(redis_keys.ACTIVE)}
        self._disarmed = self._read_disarmed(active | set(self.runs.names()))
        for run in sorted(active - self.inflow.following()):
            self._join(run)
        for run in self.runs.names():
            self._look_for_nodes(run)
        replies = self.runs.tick()
        for reply in replies:
            self.outbox.command(reply.run, [reply])
        for run in self.runs.names():
            record = self.runs.state(run)
            if self.outbox.is_waiting(run):
                self._commit(run)
            if record is not None and record.state != "running" and run in active and self._is_over(run):
                self.outbox.over(run)
                self._commit(run)
                self.runs.forget(run)
                self.inflow.leave(run)
                self._progress.pop(run, None)
                logger.info("run %s is over (%s)", run, record.state)
        if self._clock() - self._lag_at >= 5.0:
            self._lag_at = self._clock()
            self.lags = {run: lag for run in self.runs.names() if (lag := self.inflow.lag(run)) is not None}

    def _has_ranks(self, run: str) -> bool:
        pilot = self.runs.pilot(run)
        return pilot is not None and bool(pilot.ranks)

    def _is_over(self, run: str) -> bool:
        """Whether a run that is not running has nobody left: no rank, and none that says hello in what waits."""
        progress = self._progress[run]
        progress.looks += 1  # the first look is before anything could be read
        return not self._has_ranks(run) and progress.looks > 1 and not self.inflow.lag(run)

    def _look_for_nodes(self, run: str) -> None:
        """A node whose agent has fallen silent for long has lost its ranks with it."""
        pilot, progress = self.runs.pilot(run), self._progress[run]
        if pilot is None:
            return
        nodes: dict[str, list[int]] = {}
        for rank in pilot.ranks:
            if (node := progress.nodes.get(rank)) is not None:
                nodes.setdefault(node, []).append(rank)
        with self._redis.pipeline(transaction=False) as pipe:
            for node in nodes:
                pipe.exists(RunKeys(run).presence(node))
            here = dict(zip(nodes, pipe.execute(), strict=True))
        for node, ranks in nodes.items():
            progress.missing[node] = 0 if here[node] else progress.missing[node] + 1
            if progress.missing[node] >= MISSING_LOOKS:
                logger.warning("run %s: the agent of node %s is gone, and ranks %s with it", run, node, ranks)
                for rank in ranks:
                    self.outbox.command(run, self.runs.lost(run, rank))
                progress.missing.pop(node)

    def _read_disarmed(self, runs: set[str]) -> dict[str, str]:
        names = sorted(runs)
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.exists(redis_keys.DISARM)
            for run in names:
                pipe.exists(RunKeys(run).disarm)
            all_runs, *single = pipe.execute()
        everywhere = f"disarmed by {redis_keys.DISARM}" if all_runs else ""
        return {
            run: everywhere or (f"disarmed by {RunKeys(run).disarm}" if found else "")
            for run, found in zip(names, single, strict=True)
        }

    def _why_disarmed(self, run: str) -> str:
        return self._disarmed.get(run, "")

    def _keep_lease(self) -> None:
        if not self.lease.renew():
            raise Fenced("the lease could not be renewed in time")

    def _failed(self, error: Exception) -> None:
        reason = reason_of(error)
        self.errors[reason] += 1
        if not self._is_away:
            self._is_away = True
            logger.warning("redis at %s: %s (%s); deciding waits", self.link.shown, reason, words_of(error))
        if reason in ("read_only", "timeout"):
            self.link.reset()
