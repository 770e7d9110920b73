"""One run's controller: samples in, findings, decisions and commands out; results in, outcomes out.

It does no I/O. Everything worth keeping goes into `records`, everything for the ranks into `replies`; the service
takes both away after each message.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from fp8watch.controller import roster
from fp8watch.controller.carry_out import ActionLog
from fp8watch.controller.checkpoints import Ledger, verdict
from fp8watch.controller.closer import CloserLooks
from fp8watch.controller.commands import CommandTracker, because_of, failure_of
from fp8watch.controller.data_position import DataPosition
from fp8watch.controller.detecting import DetectorPipeline, named, prefix_after, troubles
from fp8watch.controller.detector_memory import PilotProgress, restore_detectors, state_if_due
from fp8watch.controller.history import History
from fp8watch.controller.merge import Merger
from fp8watch.controller.trace import Trace
from fp8watch.detect.base import Sample
from fp8watch.detect.incidents import Incident
from fp8watch.policy import events
from fp8watch.policy.decide import decide
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import Decision, PolicyState, without_waiting
from fp8watch.policy.unresolved import why_unresolved
from fp8watch.policy.view import View
from fp8watch.records import (
    ActionRecord,
    CheckpointRecord,
    CommandResult,
    Evaluation,
    Finding,
    Hello,
    Layout,
    Reply,
    StepFrame,
    Stored,
)

logger = logging.getLogger(__name__)
QUIET_STEPS = 20
"""Steps after a resume or rollback in which baseline rules keep still."""


class RunPilot:
    """Decides for one run.

    `restored`: what the store already knew of it, after a restart of this process or of the training;
    `is_same_process`: the training process is still the one that the store speaks of, with all that is in force in it.
    """

    saves_detectors = True
    """Whether what the detectors know goes into the store."""

    def __init__(
        self,
        hello: Hello,
        policy: Policy,
        *,
        term: int,
        clock: Callable[[], float],
        pipeline: DetectorPipeline,
        restored: tuple[Stored, ...] = (),
        is_same_process: bool = False,
    ) -> None:
        self.run = hello.run
        self.policy = policy
        self.attempt = hello.attempt
        self.start = hello.start
        """The start of the training processes (`Hello.start`) that commands are for."""
        self.ranks: dict[int, Hello] = {}
        self.step = hello.step
        self.seen = 0
        self.disarmed = ""
        self.verdicts: Mapping[str, Literal["approve", "refuse"]] = {}
        self.people: Mapping[str, str] = {}
        """Action id -> who gave the verdict on it."""
        self.halt_sent = ""
        """Reason of a halt that was sent."""
        self.detector_errors = 0
        self.records: list[Stored] = []
        self.replies: list[Reply] = []
        self._clock = clock
        self._merger = Merger(hello.world_size)
        self._merger.restart(hello.step)
        self._unseen: Counter[str] = Counter()
        self._data = DataPosition(hello.run, hello.attempt, hello.step)
        self._pipeline = pipeline
        self._history = History()
        self._ledger = Ledger(policy.healthy_steps)
        self._tracker = CommandTracker(hello.run, term)
        self._state = PolicyState()
        self._log = ActionLog(hello.run, clock)
        self._trace = Trace(hello.run, clock)
        self._evaluated_seen: int | None = None
        self._began_seen: int | None = 0 if hello.step > 0 else None
        """`seen` when this attempt began, of one that goes on from another."""
        self._closer = CloserLooks()
        self._evidence: dict[str, Finding] = {}
        self._tensors: tuple[str, ...] = ()
        self._modules: tuple[str, ...] = ()
        self._prefix = prefix_after(restored)
        self._quiet_until_seen = QUIET_STEPS if hello.step > 0 else 0
        self._restore(restored, hello, is_same_process=is_same_process)

    @property
    def term(self) -> int:
        """Term under which this controller sends."""
        return self._tracker.term

    def waiting(self) -> dict[str, ActionRecord]:
        """Actions that wait for a person, by id."""
        return self._log.records_of(track.action_id for track in self._state.tracks if track.phase == "waiting")

    def open_incidents(self) -> Sequence[Incident]:
        """What is wrong with the run now."""
        return self._pipeline.open_incidents()

    def progress(self) -> PilotProgress:
        """How far it has come, for the store."""
        return PilotProgress(
            run=self.run, attempt=self.attempt, step=self.step, seen=self.seen,
            quiet_until_seen=self._quiet_until_seen, prefix=self._prefix, evidence=self._evidence,
        )  # fmt: skip

    # What ranks say

    def hello(self, hello: Hello) -> None:
        """A rank is there, or there again, or there with a new attempt."""
        is_new = hello.rank not in self.ranks
        if hello.journal_term > self.term or (
            is_new and hello.journal_term == self.term and not self._tracker.has_issued
        ):
            self._tracker.learn_term(hello.journal_term)
        if not self.ranks and hello.attempt <= self.attempt:
            self._trace.began(hello, self.policy, "")
        self.ranks[hello.rank] = hello
        self.start = self.start or hello.start
        if hello.attempt > self.attempt:
            self._new_attempt(hello)
        self._collect()
        self._merger.num_ranks = hello.world_size
        if hello.attempt == self.attempt:
            self._merger.join(hello.rank, hello.step, hello.tensor_group)

    def layout(self, layout: Layout) -> None:
        """A rank's order of columns."""
        self.records.append(layout)
        self._merger.layout(layout)
        self._tensors = tuple(dict.fromkeys([*self._tensors, *(column.name for column in layout.columns)]))
        self._modules = tuple(dict.fromkeys([*self._modules, *(column.module for column in layout.columns)]))

    def frame(self, frame: StepFrame) -> None:
        """A rank's step."""
        self.records.append(frame)
        if frame.attempt != self.attempt:
            # Of a timeline that another rank's rollback has ended, or of an attempt that no hello has announced.
            self._unseen["superseded" if frame.attempt < self.attempt else "unannounced"] += 1
            return
        for sample in self._merger.frame(frame):
            self._observe(sample)

    def checkpoint(self, record: CheckpointRecord) -> None:
        """A rank has saved, or tells what it has."""
        is_known, kept = self._ledger.has(record), self._ledger.add(record)
        self.records.append(kept)
        if is_known and kept.label != record.label:  # our verdict was for processes that ended before they heard it
            self.replies.append(verdict(self.run, kept, self.start))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Scores of an evaluation."""
        self.records.append(evaluation)
        self._evaluated_seen = self.seen

    def result(self, result: CommandResult) -> None:
        """What a command came to on a rank."""
        self.records.append(result)
        matched = self._tracker.take(result)
        if matched is None:
            return
        command = self._tracker.current
        is_applied = self._tracker.is_applied(frozenset(self.ranks))
        if command is not None and command.verb == "apply" and is_applied:
            self._log.applied(command, result)
        self._conclude()
        self._collect()

    def lost(self, rank: int) -> None:
        """A rank is gone."""
        self.ranks.pop(rank, None)
        self.late(rank)

    def nobody_left(self) -> None:
        """All ranks are gone: what waits for a person has no run to be done in."""
        self._nobody_answers("the run ended before anybody answered")
        self._state = without_waiting(self._state)
        self._collect()

    def _nobody_answers(self, why: str) -> None:
        waiting = [track for track in self._state.tracks if track.phase == "waiting"]
        for track in waiting:
            self._trace.expired(track.action_id, why, track.trouble.incident if track.asked_for else None)
        self._log.expire([track.action_id for track in waiting], why)

    def held_by(self) -> tuple[int | None, list[int | None]]:
        """The oldest step that waits for frames (None: none does), and the ranks it waits for (`Merger.held_by`)."""
        return self._merger.held_by()

    def late(self, rank: int | None) -> None:
        """Go on without a rank's frames until the next one comes; None: without all that were not heard of."""
        for sample in self._merger.leave(rank):
            self._observe(sample)
        self._conclude()
        self._collect()

    def take_unseen(self) -> Counter[str]:
        """Frames since the last call that reached no detector, by reason."""
        taken, self._unseen = self._unseen + self._merger.unseen, Counter()
        self._merger.unseen.clear()
        return taken

    # A step

    def _observe(self, sample: Sample) -> None:
        self.step = self._trace.step = sample.step
        self.seen += 1
        self._history.add(sample)
        is_quiet = roster.is_warm_up(self.ranks, sample.step) or self.seen <= self._quiet_until_seen
        sample = dataclasses.replace(sample, is_quiet=is_quiet, tensor_groups=tuple(self._merger.tensor_groups))
        skipped = self._log.step_passed(sample)
        if skipped is not None:
            self._trace.read_back(skipped)
        self._closer.take(sample)
        try:
            findings = self._pipeline.observe(sample)
        except Exception:
            # A detector that fails must not take the others' work, or the run's record, with it.
            self.detector_errors += 1
            self._unseen["detectors_failed"] += 1
            level = logging.ERROR if self.detector_errors == 1 else logging.DEBUG
            logger.log(level, "detectors failed at step %s of run %s", sample.step, self.run, exc_info=True)
            findings = []
        for finding in [*findings, *self._data.look(sample, self._ledger.records())]:
            finding = self._closer.with_closer_look(named(finding, self._prefix), sample)
            self._evidence[finding.incident] = finding
            self.records.append(finding)
            self._trace.found(finding)
            logger.info(
                "run %s step %s: %s %s (%s) since step %s, %s",
                self.run, finding.step, finding.severity, finding.detector, finding.cause, finding.onset_step,
                finding.tensor or "whole run",
            )  # fmt: skip
        if (inquiry := self._closer.inquiry(self.run, self.attempt, findings, seen=self.seen)) is not None:
            self.replies.append(inquiry)
        if self.saves_detectors:
            self.records += state_if_due(self.progress(), self._pipeline, has_news=bool(findings))
        if findings:  # of closed incidents nobody asks any more
            known = {self._prefix + incident.id for incident in self.open_incidents()}
            self._evidence = {name: finding for name, finding in self._evidence.items() if name in known}
        view = self._view()
        why = lambda incident: why_unresolved(self.policy, self._state, view, incident)  # noqa: E731
        for record in self._ledger.passed(sample.step, view.troubles, why):
            self._label(record)
        self._conclude()
        self._decide()
        self._collect()

    def _decide(self) -> None:
        view = self._view()
        self._state, decisions = decide(self.policy, self._state, view)
        for decision in decisions:
            self._trace.decided(decision, view)
            if decision.kind == "note":
                continue
            self._log.take(decision, view, self.start)
            if decision.kind == "apply" and decision.action != "skip_update":
                self._send(decision, "apply", view)
            elif decision.kind == "revert":
                self._send(decision, "revert", view)

    def _send(self, decision: Decision, verb: Literal["apply", "revert"], view: View) -> None:
        command = self._tracker.issue(
            decision.action_id, verb, decision.action, dict(decision.params),
            step=view.step, seen=view.seen, attempt=self.attempt, ranks=frozenset(self.ranks),
            because=because_of(decision.trouble), start=self.start,
        )  # fmt: skip
        if decision.action == "halt" and verb == "apply":
            self.halt_sent = str(decision.params.get("reason", "halted by policy"))
        self.replies.append(command)
        logger.info("run %s step %s: %s %s: %s", self.run, view.step, verb, decision.action, decision.reason)

    def _conclude(self) -> None:
        conclusion = self._tracker.conclude(self.seen, frozenset(self.ranks))
        if conclusion is None:
            return
        action_id = conclusion.action_id
        self._trace.concluded(action_id, conclusion)
        view = self._view()
        if conclusion.command.verb == "revert":
            is_undone = conclusion.result == "applied"
            self._state = events.reverted(self._state, view, action_id, ok=is_undone)
            is_whole = all(item.action_id != action_id for item in self._state.in_force)
            self._log.reverted(action_id, conclusion, is_whole=is_whole)
            return
        self._log.concluded(action_id, conclusion)
        if conclusion.result == "applied":
            self._state = events.applied(self.policy, self._state, view, action_id)
            self._log.settling(action_id, self._state)
        elif conclusion.result == "expired":
            self._state = events.expired(self._state, action_id)
        else:
            self._state = events.failed(
                self.policy, self._state, action_id, failure_of(conclusion), was_applied=conclusion.readback == "failed"
            )

    # A new timeline

    def _new_attempt(self, hello: Hello) -> None:
        rollback = self._log.rollback_under_way(self.attempt)
        self.attempt = hello.attempt
        self.step = hello.step
        self._began_seen = self.seen
        why = "goes on from a checkpoint" if rollback is None else f"rolled back by {rollback.id}"
        self._trace.began(hello, self.policy, why)
        self._merger.restart(hello.step)
        self._data.restarted(hello.attempt, hello.step)
        self._pipeline.reset("resume" if rollback is None else "rollback", step=hello.step)
        self._history.rewind(hello.step)
        self._closer.rewind()
        self._evidence.clear()
        self._quiet_until_seen = self.seen + QUIET_STEPS
        self._nobody_answers(f"attempt {hello.attempt} began before anybody answered")
        self._state = events.rolled_back(self._state)
        onset = rollback.params.get("onset_step", hello.step + 1) if rollback is not None else hello.step + 1
        for record in self._ledger.rolled_back(hello.step, int(onset), hello.attempt):
            self._label(record)
        self._collect()

    def _label(self, record: CheckpointRecord) -> None:
        self.records.append(record)
        if record.label == "tainted":
            self._trace.tainted(record)
        self.replies.append(verdict(self.run, record, self.start))

    # Views

    def _view(self) -> View:
        return View(
            run=self.run,
            term=self._tracker.term,
            step=self.step,
            seen=self.seen,
            attempt=self.attempt,
            time_unix=self._clock(),
            troubles=troubles(self.open_incidents(), self._prefix, self._evidence),
            unavailable=roster.unavailable(self.ranks),
            checkpoints=self._ledger.records(),
            warmup_steps=roster.warmup_steps(self.ranks),
            is_warming_up=any(hello.is_warming_up for hello in self.ranks.values()),
            modules=self._modules,
            tensors=self._tensors,
            losses=tuple(self._history.losses),
            learning_rates=tuple(self._history.learning_rates),
            what_if=self._closer.comparisons,
            grad_norm_median=self._history.grad_norm_median(),
            num_skipped=self._history.num_skipped,
            params_nonfinite=self._history.params_nonfinite,
            is_nonfinite_now=self._history.is_nonfinite_now,
            is_busy=self._tracker.current is not None,
            disarmed=self.disarmed or roster.why_disarmed(self.ranks),
            verdicts=self.verdicts,
            people=self.people,
            since_start=None if self._began_seen is None else self.seen - self._began_seen,
            since_evaluation=None if self._evaluated_seen is None else self.seen - self._evaluated_seen,
            clip_rate=self._history.clip_rate(),
        )

    def _collect(self) -> None:
        self.records += [*self._trace.taken(), *self._log.changed()]

    def _restore(self, restored: tuple[Stored, ...], hello: Hello, *, is_same_process: bool) -> None:
        progress = restore_detectors(
            self.progress(), restored, hello, is_same_process=is_same_process,
            pipeline=self._pipeline, merger=self._merger, history=self._history,
        )  # fmt: skip
        self.step, self.seen = progress.step, progress.seen
        self._quiet_until_seen, self._prefix = progress.quiet_until_seen, progress.prefix
        self._evidence = dict(progress.evidence)
        self._state = self._log.restore(
            self._state, restored, policy=self.policy, is_same_process=is_same_process,
            reached=self.step, seen=self.seen,
        )  # fmt: skip
        self._ledger.remember(restored, hello, step=self.step, seen=self.seen, is_same_process=is_same_process)
