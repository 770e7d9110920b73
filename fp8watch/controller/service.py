"""All runs of one controller: messages in, replies out, everything written to the store.

The agent calls it from one thread. A failing store is counted and does not stop the decisions: what they need is in
memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from fp8watch import wire
from fp8watch.controller import markers
from fp8watch.controller.detecting import DetectorPipeline
from fp8watch.controller.detector_memory import stored_since
from fp8watch.controller.inbox import Inbox
from fp8watch.controller.open_findings import Open, OpenFindings
from fp8watch.controller.processes import is_same_process, is_started_anew
from fp8watch.controller.run import RunPilot
from fp8watch.controller.stores.base import Approval, Store
from fp8watch.controller.unseen import Predecessor, StepWait, Unseen, is_due
from fp8watch.detect.pipeline import Pipeline
from fp8watch.errors import BadInput
from fp8watch.policy import load as load_policy
from fp8watch.policy.load import parse
from fp8watch.policy.schema import Policy, lower_mode
from fp8watch.records import (
    ActionRecord,
    Arrival,
    CheckpointRecord,
    Command,
    CommandResult,
    Evaluation,
    Finding,
    Goodbye,
    Hello,
    Layout,
    LedgerUpdate,
    Message,
    Mode,
    Reply,
    RunRecord,
    StepFrame,
    Stored,
    Welcome,
)
from fp8watch.security import KeyRing, Signer
from fp8watch.security.approvals import sort as sort_approvals

logger = logging.getLogger(__name__)
PRUNE_SECONDS = 60.0
LOOK_SECONDS = 0.5
"""How often disarm markers and people's verdicts are checked."""
RECORD_SECONDS = 2.0
"""How often a running run's `last_step` is updated in its record."""


class _Run:
    def __init__(self, pilot: RunPilot, record: RunRecord, inbox: Inbox) -> None:
        self.pilot = pilot
        self.inbox = inbox
        self.record = record
        self.recorded_at = 0.0
        self.goodbyes: dict[int, Goodbye] = {}
        self.wait = StepWait()
        self.predecessor = Predecessor()
        self.is_halted = False
        self.refused: set[bytes] = set()
        """Verdicts that do not count, so that each is said once (`fp8watch.security.approvals.sort`)."""


class RunController:
    """What the agent passes messages to. `listener` gets every record, also one that could not be stored."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float],
        listener: Callable[[Stored], None] | None = None,
        directory: Path | None = None,
        max_mode: Mode = "auto",
        metrics_url: str = "",
        store_name: str = "",
        make_pipeline: Callable[[str], DetectorPipeline] = Pipeline,
        signer: Signer | None = None,
        approval_ring: KeyRing | None = None,
        disarmed_by: Callable[[str], str] | None = None,
        on_unseen: Callable[[str, str, int], None] | None = None,
        on_open: Callable[[str, Open], None] | None = None,
    ) -> None:
        """`signer` signs what makes ranks act; `approval_ring` verifies people's verdicts (None: whoever can write to
        the store is believed). `disarmed_by` says why a run is disarmed, instead of the marker files. `on_unseen` is
        called with (run, reason, count) for frames that reached no detector, `on_open` with (run, open findings) when
        those change."""
        self.store_errors: Counter[str] = Counter()
        """Run -> number of failed writes."""
        self.ignored: Counter[str] = Counter()
        """Reason -> number of messages that could not be used."""
        self.unseen = Unseen(on_unseen)
        self.open_findings = OpenFindings(on_open)
        self.metrics_url = metrics_url
        self.store_name = store_name
        self._store = store
        self._clock = clock
        self._listener = listener
        self._directory = directory
        self._max_mode = max_mode
        self._make_pipeline = make_pipeline
        self._signer = signer or Signer(None)
        self._approval_ring = approval_ring
        self._disarmed_by = disarmed_by
        self._runs: dict[str, _Run] = {}
        self._pruned_at = clock()
        self._looked_at = 0.0

    _pilot_class: type[RunPilot] = RunPilot

    @property
    def _lease_term(self) -> int:
        """Term of the controller's lease, where there is one."""
        return 0

    def _new_inbox(self, name: str) -> Inbox:
        return Inbox(name, self._earlier(name))

    def _first_term(self, hello: Hello) -> int:
        """Term of the first commands to a run that was not known here before."""
        return hello.journal_term + 1

    # The three entries

    def receive(self, message: Message) -> list[Reply]:
        """Process a rank's message. Replies go to all ranks of its run; a `Welcome` only to the sender."""
        if isinstance(message, Hello):
            return self._hello(message)
        run = self._runs.get(message.run)
        if run is None:
            self.ignored["no hello"] += 1
            return []
        pilot = run.pilot
        if isinstance(message, StepFrame):
            frame = run.inbox.frame(message)
            if frame is None:
                self.ignored["repeated frame"] += 1
                return []
            pilot.frame(frame)
            return self._flush(run)
        run.inbox.message(message)
        if isinstance(message, Layout):
            pilot.layout(message)
        elif isinstance(message, CheckpointRecord):
            pilot.checkpoint(message)
        elif isinstance(message, CommandResult):
            pilot.result(message)
            if message.status == "applied" and pilot.halt_sent:
                self._halted(run)
        elif isinstance(message, Evaluation):
            pilot.evaluation(message)
        elif isinstance(message, Goodbye):
            run.goodbyes[message.rank] = message
            return self._gone(run, message.rank)
        return self._flush(run)

    def lost(self, name: str, rank: int) -> list[Reply]:
        """A rank's connection ended, with or without a goodbye."""
        run = self._runs.get(name)
        if run is None or rank not in run.pilot.ranks:
            return []
        run.inbox.lost(rank)
        return self._gone(run, rank)

    def tick(self) -> list[Reply]:
        """What only time brings: people's verdicts, disarming, retention. Call it about once per second."""
        now = self._clock()
        replies: list[Reply] = []
        if is_due(now, self._looked_at, LOOK_SECONDS):
            self._looked_at = now
            self.look()
        self._each(lambda run: replies.extend(self._go_on_without_the_late(run, now)))
        if is_due(now, self._pruned_at, PRUNE_SECONDS):
            self._pruned_at = now
            for name in self._runs:
                self._guard(name, lambda name=name: self._store.prune(name))  # type: ignore[misc]
        return replies

    def look(self) -> None:
        """Check disarm markers and people's verdicts now, in all runs."""
        self._each(self._look)

    def _each(self, work: Callable[[_Run], None]) -> None:
        for name, run in list(self._runs.items()):
            try:
                work(run)
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        raise error  # an agent has one run, and its session catches this

    def _go_on_without_the_late(self, run: _Run, now: float) -> list[Reply]:
        step, ranks = run.pilot.held_by()
        if run.wait.has_ended(run.pilot.attempt, step, now):
            shown = ", ".join("all not heard of" if rank is None else str(rank) for rank in ranks)
            logger.warning(
                "run %s: step %s is judged without the frames of ranks %s, which are late", run.record.run, step, shown
            )
            for rank in ranks:
                run.inbox.late(rank)
                run.pilot.late(rank)
        return self._flush(run)

    def state(self, name: str) -> RunRecord | None:
        """The record of a run; None: it is not known here."""
        run = self._runs.get(name)
        return run.record if run is not None else None

    # Coming and going

    def _hello(self, hello: Hello) -> list[Reply]:
        run = self._runs.get(hello.run)
        if run is None or is_started_anew(run.pilot.ranks, run.record.hello, hello):
            run = self._start(hello, run.inbox if run is not None else None)
            self._runs[hello.run] = run
        run.inbox.message(hello)
        run.pilot.hello(hello)
        self.unseen.add(hello.run, "missing", run.predecessor.lost(hello))
        run.goodbyes.pop(hello.rank, None)
        shown = hello if hello.rank == min(run.pilot.ranks) else run.record.hello
        self._change(run, hello=shown, state="halted" if run.is_halted else "running", reason=run.pilot.halt_sent)
        self._look(run)
        welcome = Welcome(
            wire_version=wire.WIRE_VERSION, run=hello.run, term=run.pilot.term, metrics_url=self.metrics_url,
            store=self.store_name,
        )  # fmt: skip
        return [welcome, *self._flush(run)]

    def _start(self, hello: Hello, inbox: Inbox | None) -> _Run:
        now = self._clock()
        known, restored, predecessor = self._remembered(hello.run)
        inbox = inbox or self._new_inbox(hello.run)
        inbox.opened(self._max_mode, known.last_step if known is not None else 0, self._lease_term)
        term = self._first_term(hello)
        pilot = self._pilot_class(
            hello,
            self._policy(hello),
            term=term,
            clock=inbox.now,
            pipeline=self._make_pipeline(hello.run),
            restored=restored,
            is_same_process=known is not None and is_same_process(known.hello, hello),
        )
        started = known.started_unix if known is not None else now
        record = RunRecord(
            run=hello.run, state="running", hello=hello, started_unix=started, updated_unix=now, last_step=hello.step
        )
        run = _Run(pilot, record, inbox)
        run.predecessor = predecessor
        return run

    def _earlier(self, name: str) -> list[Arrival]:
        try:
            return list(self._store.read(name, Arrival))
        except Exception:
            self.store_errors[name] += 1
            return []

    def _remembered(self, name: str) -> tuple[RunRecord | None, tuple[Stored, ...], Predecessor]:
        try:
            known = next(self._store.read(name, RunRecord), None)
            if known is None:
                return None, (), Predecessor()
            kept: list[Stored] = [
                *self._store.read(name, CheckpointRecord),
                *self._store.read(name, ActionRecord),
                *self._store.read(name, Finding),
                *stored_since(self._store, name),
            ]
            # The record may lag by `RECORD_SECONDS`; only little was stored since.
            predecessor = Predecessor(self._store.read(name, StepFrame, first_step=known.last_step))
            # The run record itself makes the tuple non-empty, which tells that an earlier process has used ids.
            return known, (known, *kept), predecessor
        except Exception:
            self.store_errors[name] += 1
            logger.exception("cannot read what the store knows of run %s", name)
            return None, (), Predecessor()

    def _policy(self, hello: Hello) -> Policy:
        try:
            policy = load_policy(None) if hello.policy is None else parse(hello.policy, hello.policy_name)
        except BadInput as error:
            logger.error("policy of run %s is not valid, observing only: %s", hello.run, "; ".join(error.problems))
            policy = load_policy(None)
        return policy.model_copy(update={"mode": lower_mode(policy.mode, self._max_mode)})

    def _gone(self, run: _Run, rank: int) -> list[Reply]:
        run.pilot.lost(rank)
        if not run.pilot.ranks:
            run.pilot.nobody_left()
            goodbye = run.goodbyes.get(rank)
            if run.is_halted or run.pilot.halt_sent:
                self._halted(run)
            elif goodbye is not None:
                self._change(run, state="ended", reason=goodbye.reason)
            else:
                self._change(run, state="lost", reason="the connection ended without a goodbye")
        return self._flush(run)

    def _halted(self, run: _Run) -> None:
        if run.is_halted:
            return
        run.is_halted = True
        reason = run.pilot.halt_sent
        self._change(run, state="halted", reason=reason)
        if self._directory is not None:
            directory, name, step = self._directory, run.record.run, run.pilot.step
            self._guard(
                name,
                lambda: markers.write_halted(directory, name, reason=reason, step=step, time_unix=self._clock()),
            )

    def _look(self, run: _Run) -> None:
        name, pilot = run.record.run, run.pilot
        pilot.disarmed = self._why_disarmed(name)
        run.inbox.disarmed(pilot.disarmed)
        waiting = pilot.waiting()
        if waiting:
            try:
                approvals = self._genuine(run, waiting, self._store.approvals(name))
            except Exception:
                self.store_errors[name] += 1
                logger.exception("cannot read approvals of run %s", name)
                return
            run.inbox.approvals(approvals)
            pilot.verdicts = {item.action_id: item.verdict for item in approvals}
            pilot.people = {item.action_id: item.by for item in approvals}

    def _why_disarmed(self, name: str) -> str:
        if self._disarmed_by is not None:
            return self._disarmed_by(name)
        if self._directory is None:
            return ""
        try:
            return markers.why_disarmed(self._directory, name)
        except OSError as error:
            # Not knowing whether somebody said stop is reason enough to stop.
            return f"disarm markers cannot be read: {error}"

    def _genuine(self, run: _Run, waiting: dict[str, ActionRecord], approvals: list[Approval]) -> list[Approval]:
        genuine, refused = sort_approvals(approvals, waiting, self._approval_ring, run.refused)
        for why in refused:
            self.ignored["forged approval"] += 1
            logger.warning("run %s: an approval or refusal is ignored: %s", run.record.run, why)
        return genuine

    # The store

    def _change(self, run: _Run, **changes: object) -> None:
        now = self._clock()
        run.record = msgspec.structs.replace(run.record, updated_unix=now, last_step=run.pilot.step, **changes)
        run.recorded_at = now
        run.pilot.records.append(run.record)

    def _flush(self, run: _Run) -> list[Reply]:
        pilot = run.pilot
        if pilot.step != run.record.last_step and is_due(self._clock(), run.recorded_at, RECORD_SECONDS):
            self._change(run)
        for reason, count in pilot.take_unseen().items():
            self.unseen.add(run.record.run, reason, count)
        records, pilot.records = [*run.inbox.records, *pilot.records], []
        run.inbox.records = []
        replies, pilot.replies = [self._signed(reply) for reply in pilot.replies], []
        if records:
            self._guard(run.record.run, lambda: self._store.append(run.record.run, records))
        if self._listener is not None:
            for record in records:
                self._listener(record)
        self.open_findings.look(run.record.run, pilot.open_incidents())
        return replies

    def _signed(self, reply: Reply) -> Reply:
        if isinstance(reply, Command):
            return self._signer.command(reply)
        if isinstance(reply, LedgerUpdate):
            return self._signer.ledger(msgspec.structs.replace(reply, issued_ns=int(self._clock() * 1e9)))
        return reply

    def _guard(self, name: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:
            self.store_errors[name] += 1
            if self.store_errors[name] == 1:
                logger.exception("writing to the store failed for run %s; deciding goes on from memory", name)
            else:
                logger.debug("writing to the store failed again for run %s: %s", name, error)
