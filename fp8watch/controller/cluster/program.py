"""`fp8watch controller`: one process decides for all runs of a cluster, others stand by.

One round: renew the lease, read the agents' messages, decide, commit. The decisions of a round are sent by its commit
and not before. Nothing is lost while Redis does not answer: decisions wait in memory and are committed under the same
number when it answers again.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from fp8watch.controller.cluster import redis_keys
from fp8watch.controller.cluster.aside import SetAsideRuns
from fp8watch.controller.cluster.contest import Contests
from fp8watch.controller.cluster.holders import Refusal
from fp8watch.controller.cluster.inflow import Entered, Inflow
from fp8watch.controller.cluster.lease import Lease
from fp8watch.controller.cluster.outbox import Fenced, Interrupted, Outbox
from fp8watch.controller.cluster.progress import Progress
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.cluster.redis_link import RedisError, RedisLink, is_about_a_key, reason_of, words_of
from fp8watch.controller.cluster.retention import Retention
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.cluster.stops import Stops
from fp8watch.controller.cluster.takeover import Takeover
from fp8watch.controller.open_findings import Open
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Hello, Mode, NodeFrame, Stored, Uplink
from fp8watch.security import KeyRing, Signer

logger = logging.getLogger(__name__)
REMEMBER_SECONDS = 1.0
"""How often a run's memory is written while there are no decisions: a successor processes at most that much again."""
MEMORY_BYTES_A_SECOND = 4 * 1024**2
"""A large memory (1,680 tensors with windows of 1,024 updates: over 20 MB) is written less often, so that it uses no
more than this bandwidth to Redis."""
LOOK_SECONDS = 1.0
"""How often the program looks for new runs, missing nodes and verdicts."""
ABANDONED_TIMES = 4
"""How often it is asked who has ranks of a run of which nothing is known before it is let go: half a minute."""
MISSING_LOOKS = 10
"""Consecutive looks in which a node's agent must be absent before its ranks count as lost."""
STANDBY_SECONDS = 0.25
MAX_RETRY_SECONDS = 1.0


class ClusterProgram:
    """Runs until `stop`. `clock` is monotonic."""

    def __init__(
        self,
        link: RedisLink,
        *,
        holder: str,
        lease_seconds: float = 3.0,
        keep_seconds: float = 600.0,
        keep_days: float = 30.0,
        keep_runs: int = 10_000,
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
        self._stops = Stops(link)
        self._retention = Retention(self.store, keep_days=keep_days, keep_runs=keep_runs, clock=clock)
        self.runs = ClusterController(
            self.outbox, clock=time.time, listener=listener, max_mode=max_mode, signer=signer,
            approval_ring=approval_ring, disarmed_by=self._stops.why, on_open=on_open,
        )  # fmt: skip
        self._signer = signer or Signer(None)
        self._progress: dict[str, Progress] = defaultdict(Progress)
        self._backlog: deque[Entered] = deque()
        """Entries that were read but not processed yet, because Redis stopped answering in between."""
        self._stopping = threading.Event()
        self._looked_at = self._lag_at = 0.0
        self._is_away = False
        self.errors: Counter[str] = Counter()
        """Reason -> number of failures."""
        self.aside = SetAsideRuns(clock)
        self._contests = Contests(link, clock)
        self._takeover = Takeover(self.store, self.outbox, self.inflow, self.runs, self._signer, self.errors)
        self.takeovers = 0
        self.lags: dict[str, int] = {}
        self.delays: dict[str, float] = {}
        """Run -> seconds from the creation of the newest frame until it was processed."""

    @property
    def is_active(self) -> bool:
        """Whether this process is the one that decides."""
        return self.lease.is_held

    def stop(self) -> None:
        """End soon and release the lease. Safe in a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Run rounds until `stop`."""
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
            except Exception:
                # Of no single run. Ending would only pass it on to the next controller, or to a restart.
                self.errors["internal"] += 1
                logger.exception("a round of this controller failed: it gives the lease up and applies for it again")
                self._step_down()
                self._stopping.wait(MAX_RETRY_SECONDS)
            if self._is_away:
                self._is_away = False
                logger.info("redis at %s answers again", self.link.shown)
            retry_seconds = 0.1
        try:
            for run in self.runs.names():
                self._alone(run, lambda run=run: self._commit(run))  # type: ignore[misc]
            self.lease.release()
        except (Fenced, RedisError, OSError) as error:
            logger.warning("the last state could not be written: %s", error)

    def _round(self) -> bool:
        """One round. Returns False if another controller is active."""
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
            # The lease had expired but nobody else took it: what is known here is still complete.
            logger.info("active again under term %d", term)
            for run in self.inflow.following():
                self._alone(run, lambda run=run: self._claim_again(run))  # type: ignore[misc]
            return
        self._step_down()
        logger.info("active under term %d", term)

    def _step_down(self) -> None:
        self.outbox.drop_all()
        self.inflow.leave_all()
        self.runs.drop_all()
        self._progress.clear()
        self._backlog.clear()
        self._contests.clear()

    def _join(self, run: str) -> None:
        """Start to decide for a run, from where another controller stopped, if there was one."""
        self._progress[run] = Progress()
        entries: list[Entered] = []
        may_use_memory = self.aside.may_use_memory(run)
        self._alone(run, lambda: entries.extend(self._takeover.join(run, may_use_memory=may_use_memory)))
        self._take(entries)

    def _catch_up(self, run: str) -> None:
        """Frames come that cannot be judged: take what their ranks have said and the stream does not have."""
        missed = self._takeover.missed(run)
        self.runs.has_caught_up(run)
        has_found = any(not self.runs.refusal(item.message, item.node) for item in missed if item.message is not None)
        times = self._progress[run].caught_up(self._clock(), has_found=has_found)
        self._take(missed)
        if times > ABANDONED_TIMES and self.runs.pilot(run) is None and self._takeover.is_abandoned(run):
            self._close_run(run, "no agent says that it has ranks of it")

    # One run's failure is its own

    def _alone(self, run: str, work: Callable[[], object]) -> None:
        """Do something for one run. What fails concerns that run only, unless it is Redis or the lease."""
        try:
            work()
        except Fenced:
            raise
        except Exception as error:
            if isinstance(error, RedisError | OSError) and not is_about_a_key(error):
                raise
            self._set_aside(run, error)

    def _set_aside(self, run: str, error: Exception) -> None:
        """Take a run away for a while, and acknowledge what was read of it: the cause must not come back with it."""
        seconds = self.aside.set_aside(run)
        logger.error("run %s cannot be processed and is set aside for %.0f s", run, seconds, exc_info=error)
        self._backlog = deque(entry for entry in self._backlog if entry.run != run)
        done = self._progress.pop(run, Progress()).read()
        memory = self._where(run) if run in self.inflow.following() else {}
        self.runs.forget(run)
        self.inflow.leave(run)
        self.outbox.drop(run)
        try:
            self.outbox.commit(run, memory=memory, done=done)
        except (RedisError, OSError) as again:
            self.outbox.drop(run)
            if not is_about_a_key(again):
                raise

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
            if message is not None and (why := self.runs.refusal(message, entry.node)):
                self._refuse(entry, message, why)
                message = None
            if message is None:
                progress.finish(entry.entry_id)
                self._backlog.popleft()
                continue
            progress.has_heard = True
            try:
                self.outbox.command(entry.run, self.runs.take(message, entry.entry_id, entry.node))
            except Exception:
                # One message that cannot be processed must not block all others.
                self.runs.ignored["failed"] += 1
                logger.exception("message %s of run %s failed", entry.entry_id, entry.run)
            if isinstance(message, Hello):
                self._contests.admitted(entry.run, entry.node)
            self._backlog.popleft()
            if isinstance(message, NodeFrame):
                progress.open_frames.append(((message.attempt, message.step), dataclasses.replace(entry, message=None)))
                self.delays[entry.run] = time.time() - message.time_unix
            else:
                progress.finish(entry.entry_id)
        for run in {*touched, *self.runs.names()}:
            self._alone(run, lambda run=run: self._commit_if_due(run))  # type: ignore[misc]

    def _refuse(self, entry: Entered, message: Uplink, why: Refusal) -> None:
        """Only the nodes that hold a run can speak for it."""
        self.inflow.refused[entry.run, why] += 1
        level = logging.WARNING if self.inflow.refused[entry.run, why] == 1 else logging.DEBUG
        kind = type(message).__name__
        logger.log(level, "run %s: %s from node %s, which does not hold it, refused", entry.run, kind, entry.node)
        pilot = self.runs.pilot(entry.run)
        if isinstance(message, NodeFrame) and pilot is not None:
            pilot.needs_catch_up = True  # its hello may have been missed
        if isinstance(message, Hello) and pilot is not None:
            self._contests.refused(message, entry.node, pilot.ranks, self.runs.nodes[entry.run])

    def _commit_if_due(self, run: str) -> None:
        progress = self._progress[run]
        pause = max(REMEMBER_SECONDS, progress.memory_bytes / MEMORY_BYTES_A_SECOND)
        if self.outbox.is_weighty(run) or (progress.is_dirty and self._clock() - progress.remembered_at >= pause):
            self._commit(run)
        elif self.outbox.is_waiting(run):
            self.outbox.commit(run, memory={}, done=[])

    def _where(self, run: str) -> dict[str, bytes]:
        """How far a run's entries were read, as signed parts of its state."""
        parts = {
            "last_id": self.inflow.last_id(run).encode(),
            "numbers": msgspec.msgpack.encode(self.inflow.numbers(run)),
        }
        return {name: self._signer.memory(run, name, data) for name, data in parts.items()}

    def _commit(self, run: str) -> None:
        progress = self._progress[run]
        pilot = self.runs.pilot(run)
        progress.settle(None if pilot is None else pilot.closed)
        remembered = self.runs.memory(run)
        memory = {
            "nodes": msgspec.msgpack.encode(self.runs.nodes[run]),
            "unfinished": msgspec.msgpack.encode(progress.unfinished()),
        } | ({"memory": remembered} if remembered is not None else {})
        memory = self._where(run) | {name: self._signer.memory(run, name, data) for name, data in memory.items()}
        progress.memory_bytes = len(remembered or b"")
        is_kept = self.outbox.commit(run, memory=memory, done=progress.done)
        progress.done = []
        progress.remembered_at, progress.is_dirty = self._clock(), False
        if not is_kept:
            self._write_again(run)

    def _claim_again(self, run: str) -> None:
        if not self.outbox.claim(run):
            self._write_again(run)

    def _write_again(self, run: str) -> None:
        """Redis has lost the data of a run: write again what is known here."""
        logger.warning("redis at %s has lost run %s; writing again what is known here", self.link.shown, run)
        self.errors["data_lost"] += 1
        self.outbox.revive(run)
        self.outbox.append(run, self.runs.everything(run))
        self._commit(run)

    def _look(self) -> None:
        """Work that no message triggers: new and ended runs, missing nodes, verdicts, timeouts, lag."""
        active = {name.decode(errors="replace") for name in self._redis.smembers(redis_keys.ACTIVE)}
        self._stops.read(active | set(self.runs.names()))
        for run in sorted(active - self.inflow.following()):
            if self.aside.is_due(run):
                self._join(run)
        for run in self.runs.names():
            self._alone(run, lambda run=run: self._look_for_nodes(run))  # type: ignore[misc]
        for reply in self.runs.tick():
            self.outbox.command(reply.run, [reply])
        for run, error in self.runs.taken_failures():
            self._set_aside(run, error)
        for run in self.runs.names():
            self._alone(run, lambda run=run: self._look_at(run, is_active=run in active))  # type: ignore[misc]
        for run in self.inflow.following():
            if self._progress[run].may_catch_up(self._clock(), needs_catch_up=self.runs.needs_catch_up(run)):
                self._alone(run, lambda run=run: self._catch_up(run))  # type: ignore[misc]
        self._retention.step(active | self.inflow.following())
        if self._clock() - self._lag_at >= 5.0:
            self._lag_at = self._clock()
            self.lags = {run: lag for run in self.runs.names() if (lag := self.inflow.lag(run)) is not None}

    def _look_at(self, run: str, *, is_active: bool) -> None:
        record = self.runs.state(run)
        if self.outbox.is_waiting(run):
            self._commit(run)
        if record is not None and record.state != "running" and is_active and self._is_over(run):
            self._close_run(run, record.state)

    def _close_run(self, run: str, why: str) -> None:
        self.outbox.over(run)
        self._commit(run)
        self.runs.forget(run)
        self.inflow.leave(run)
        has_heard = self._progress.pop(run, Progress()).has_heard
        self.aside.over(run) if has_heard else self.aside.look_later(run)
        logger.info("run %s is over (%s)", run, why)

    def _is_over(self, run: str) -> bool:
        """Whether a run that is not running has no ranks left, and no unread entry that could bring one."""
        progress, pilot = self._progress[run], self.runs.pilot(run)
        progress.looks += 1  # the first look comes before anything was read
        return not (pilot is not None and pilot.ranks) and progress.looks > 1 and not self.inflow.lag(run)

    def _look_for_nodes(self, run: str) -> None:
        """Report the ranks of a node as lost when its agent has been absent for `MISSING_LOOKS` looks."""
        progress, nodes = self._progress[run], self.runs.by_node(run)
        with self._redis.pipeline(transaction=False) as pipe:
            for node in nodes:
                pipe.exists(RunKeys(run).presence(node))
            here = dict(zip(nodes, pipe.execute(), strict=True))
        for node, ranks in nodes.items():
            progress.missing[node] = 0 if here[node] else progress.missing[node] + 1
            if progress.missing[node] >= MISSING_LOOKS:
                logger.warning("run %s: the agent of node %s is gone, so ranks %s are lost", run, node, ranks)
                for rank in ranks:
                    self.outbox.command(run, self.runs.lost(run, rank))
                progress.missing.pop(node)

    def _keep_lease(self) -> None:
        if not self.lease.renew():
            raise Fenced("the lease could not be renewed in time")

    def _failed(self, error: Exception) -> None:
        reason = reason_of(error)
        self.errors[reason] += 1
        if not self._is_away:
            self._is_away = True
            logger.warning("redis at %s: %s (%s); decisions are on hold", self.link.shown, reason, words_of(error))
        if reason in ("read_only", "timeout"):
            self.link.reset()
