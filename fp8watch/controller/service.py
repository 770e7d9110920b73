"""All runs of one controller: messages in, replies out, everything written to the store.

The agent calls it from one thread. A store that fails is counted and does not stop the deciding: what is needed
for that is in memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from fp8watch import wire
from fp8watch.controller import markers
from fp8watch.controller.run import Detecting, RunPilot
from fp8watch.controller.store import Store
from fp8watch.detect.pipeline import Pipeline
from fp8watch.errors import BadInput
from fp8watch.policy import load as load_policy
from fp8watch.policy.load import parse
from fp8watch.policy.schema import Policy, lower_mode
from fp8watch.records import (
    ActionRecord,
    CheckpointRecord,
    CommandResult,
    Evaluation,
    Finding,
    Goodbye,
    Hello,
    Layout,
    Message,
    Mode,
    Reply,
    RunRecord,
    StepFrame,
    Stored,
    Welcome,
)

logger = logging.getLogger(__name__)
PRUNE_SECONDS = 60.0
LOOK_SECONDS = 0.5
"""How often disarm markers and people's verdicts are looked for."""
RECORD_SECONDS = 2.0
"""How often a running run's `last_step` is brought up to date in its record."""


class _Run:
    def __init__(self, pilot: RunPilot, record: RunRecord) -> None:
        self.pilot = pilot
        self.record = record
        self.recorded_at = 0.0
        self.goodbyes: dict[int, Goodbye] = {}
        self.is_halted = False


class RunController:
    """What the agent hands messages to. `listener` hears every record that is stored, also when storing failed."""

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
        make_pipeline: Callable[[str], Detecting] = Pipeline,
    ) -> None:
        self.store_errors: Counter[str] = Counter()
        """Run -> writes that failed."""
        self.ignored: Counter[str] = Counter()
        """Reason -> messages that could not be used."""
        self.metrics_url = metrics_url
        self.store_name = store_name
        self._store = store
        self._clock = clock
        self._listener = listener
        self._directory = directory
        self._max_mode = max_mode
        self._make_pipeline = make_pipeline
        self._runs: dict[str, _Run] = {}
        self._pruned_at = clock()
        self._looked_at = 0.0

    # The three entries

    def receive(self, message: Message) -> list[Reply]:
        """Take a rank's message in. Replies go to all ranks of its run; a `Welcome` to the sender only."""
        if isinstance(message, Hello):
            return self._hello(message)
        run = self._runs.get(message.run)
        if run is None:
            self.ignored["no hello"] += 1
            return []
        pilot = run.pilot
        if isinstance(message, StepFrame):
            pilot.frame(message)
        elif isinstance(message, Layout):
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
        return self._gone(run, rank)

    def tick(self) -> list[Reply]:
        """What time alone brings about: verdicts of people, disarming, retention. Call it about once a second."""
        now = self._clock()
        replies: list[Reply] = []
        if _is_due(now, self._looked_at, LOOK_SECONDS):
            self._looked_at = now
            for run in self._runs.values():
                self._look(run)
        for run in self._runs.values():
            replies += self._flush(run)
        if _is_due(now, self._pruned_at, PRUNE_SECONDS):
            self._pruned_at = now
            for name in self._runs:
                self._guard(name, lambda name=name: self._store.prune(name))  # type: ignore[misc]
        return replies

    def state(self, name: str) -> RunRecord | None:
        """The record of a run that is known here."""
        run = self._runs.get(name)
        return run.record if run is not None else None

    # Coming and going

    def _hello(self, hello: Hello) -> list[Reply]:
        run = self._runs.get(hello.run)
        if run is None or _is_started_anew(run, hello):
            run = self._start(hello)
            self._runs[hello.run] = run
        run.pilot.hello(hello)
        run.goodbyes.pop(hello.rank, None)
        shown = hello if hello.rank == min(run.pilot.ranks) else run.record.hello
        self._change(run, hello=shown, state="halted" if run.is_halted else "running", reason=run.pilot.halt_sent)
        self._look(run)
        welcome = Welcome(
            wire_version=wire.WIRE_VERSION,
            run=hello.run,
            term=run.pilot.term,
            metrics_url=self.metrics_url,
            store=self.store_name,
        )
        return [welcome, *self._flush(run)]

    def _start(self, hello: Hello) -> _Run:
        now = self._clock()
        known, restored = self._remembered(hello.run)
        term = hello.journal_term + 1
        pilot = RunPilot(
            hello,
            self._policy(hello),
            term=term,
            clock=self._clock,
            pipeline=self._make_pipeline(hello.run),
            restored=restored,
            is_same_process=known is not None and _is_same_process(known.hello, hello),
        )
        started = known.started_unix if known is not None else now
        record = RunRecord(
            run=hello.run, state="running", hello=hello, started_unix=started, updated_unix=now, last_step=hello.step
        )
        return _Run(pilot, record)

    def _remembered(self, name: str) -> tuple[RunRecord | None, tuple[Stored, ...]]:
        try:
            known = next((record for record in self._store.runs() if record.run == name), None)
            if known is None:
                return None, ()
            kept: list[Stored] = [
                *self._store.read(name, CheckpointRecord),
                *self._store.read(name, ActionRecord),
                *self._store.read(name, Finding),
            ]
            # The run record itself makes it non-empty: an earlier process has used ids of this run.
            return known, (known, *kept)
        except Exception:
            self.store_errors[name] += 1
            logger.exception("cannot read what the store knows of run %s", name)
            return None, ()

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
        if self._directory is not None:
            try:
                pilot.disarmed = markers.why_disarmed(self._directory, name)
            except OSError as error:
                # Not knowing whether somebody said stop is reason enough to stop.
                pilot.disarmed = f"disarm markers cannot be read: {error}"
        if pilot.is_waiting:
            try:
                pilot.verdicts = {item.action_id: item.verdict for item in self._store.approvals(name)}
            except Exception:
                self.store_errors[name] += 1
                logger.exception("cannot read approvals of run %s", name)

    # The store

    def _change(self, run: _Run, **changes: object) -> None:
        now = self._clock()
        run.record = msgspec.structs.replace(run.record, updated_unix=now, last_step=run.pilot.step, **changes)
        run.recorded_at = now
        run.pilot.records.append(run.record)

    def _flush(self, run: _Run) -> list[Reply]:
        pilot = run.pilot
        if pilot.step != run.record.last_step and _is_due(self._clock(), run.recorded_at, RECORD_SECONDS):
            self._change(run)
        records, pilot.records = pilot.records, []
        replies, pilot.replies = pilot.replies, []
        if records:
            self._guard(run.record.run, lambda: self._store.append(run.record.run, records))
        if self._listener is not None:
            for record in records:
                self._listener(record)
        return replies

    def _guard(self, name: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:
            self.store_errors[name] += 1
            if self.store_errors[name] == 1:
                logger.exception("writing to the store failed for run %s; deciding goes on from memory", name)
            else:
                logger.debug("writing to the store failed again for run %s: %s", name, error)


def _is_due(now: float, last: float, seconds: float) -> bool:
    """Whether something is to be done again. A clock that was set back must not put it off until it has caught up."""
    return not 0.0 <= now - last < seconds


def _is_started_anew(run: _Run, hello: Hello) -> bool:
    """Whether training was started again since. The end of the process before may not have been noticed yet, and a
    start is no rollback: checkpoints of the attempt before are as good as they were."""
    before = run.pilot.ranks.get(hello.rank)
    if before is not None:
        return (before.pid, before.host) != (hello.pid, hello.host)
    return not run.pilot.ranks and not _is_same_process(run.record.hello, hello)


def _is_same_process(known: Hello, hello: Hello) -> bool:
    """Whether a hello comes from the training processes that are known already, and not from ones started anew.

    Of another rank than the one that is known only the attempt can be compared: every start begins a new one.
    """
    if known.rank == hello.rank:
        # Attached anew in the same process it has another attempt, and nothing in force.
        return (known.pid, known.host, known.attempt) == (hello.pid, hello.host, hello.attempt)
    return known.attempt == hello.attempt
