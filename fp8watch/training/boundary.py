"""The step boundary: carries out the commands that are due, and reads their effects back.

At each boundary, the effects of earlier commands are read back first; then due commands are carried out, oldest first.
A command is written to the journal and synced before it changes anything. Every command is answered with the step and
the reason, also one that is not carried out (expired, refused, disarmed, unavailable), so that nobody waits for it.

With several ranks, a command is put to the vote one boundary before it is carried out. The result is binding, whatever
this rank has learnt since. Afterwards the ranks compare outcomes: if one failed, the others revert the command before
the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8watch import action_words
from fp8watch.actions.base import Action, Applied, ReadBack
from fp8watch.actions.undo import settled
from fp8watch.records import Command, CommandResult, Mode, Verb
from fp8watch.training.agreement.base import (
    Agreement,
    Candidate,
    JointOutcome,
    MustStop,
    RankOutcome,
    Refusal,
    Ruling,
    Status,
    asks_first,
)
from fp8watch.training.agreement.questions import agree_on_target
from fp8watch.training.disarm import Disarm
from fp8watch.training.journal import Journal
from fp8watch.training.on_this_rank import LocalResult, carry_out, take_back_here

logger = logging.getLogger(__name__)

READBACK_STEPS = 8
"""Boundaries at which an effect is read back before it counts as missing. Most effects are visible after one step; one
that needs a forward of its module may have to wait for an evaluation to end."""


@dataclass(slots=True)
class _Unconfirmed:
    """An applied command whose effect is not confirmed yet."""

    command: Command
    action: Action
    applied: Applied
    step: int
    num_read_backs: int = 0

    def read_back(self) -> ReadBack:
        """Whether the action, or its revert, is in force."""
        is_revert = self.command.verb == "revert"
        return self.action.read_back_revert(self.applied) if is_revert else self.action.read_back(self.applied)


class Boundary:
    """Carries out one rank's commands, on the training thread."""

    def __init__(
        self,
        *,
        rank: int,
        actions: Mapping[str, Action],
        capabilities: Callable[[], Mapping[str, str]],
        journal: Journal,
        agreement: Agreement,
        disarm: Disarm,
        mode: Mode,
        send: Callable[[CommandResult], object],
        attempt: Callable[[], int],
        start: str,
        on_broken: Callable[[str], None],
        on_stop: Callable[[str], None] | None = None,
        objection: Callable[[Command], str | None] = lambda command: None,
    ) -> None:
        """`start`: name of this start of the training processes (`Hello.start`). Commands for another start are
        refused; if the name is empty, all are. `on_broken` is called when a restore failed half-way, so that training
        must not continue. `on_stop` is called when ranks may be in different states, so that this one must not make
        another optimizer step. `objection`: why this rank vetoes a command that it could carry out, or None."""
        self._rank = rank
        self._actions = actions
        self._capabilities = capabilities
        self._journal = journal
        self._agreement = agreement
        self._disarm = disarm
        self._mode = mode
        self._send = send
        self._attempt = attempt
        self._start = start
        self._on_broken = on_broken
        self._on_stop = on_stop or on_broken
        self._objection = objection
        self._waiting: list[Command] = []
        self._unconfirmed: list[_Unconfirmed] = []
        self._applied: dict[str, Applied] = {}
        self._answers: dict[tuple[str, str], CommandResult] = {}

    @property
    def is_idle(self) -> bool:
        """No command is queued or waits for its read-back. With `is_joint`, the boundary has to be run anyway."""
        return not self._waiting and not self._unconfirmed

    @property
    def is_due(self) -> bool:
        """Whether the boundary has to be run."""
        return bool(self._waiting or self._unconfirmed or self._agreement.is_joint)

    @property
    def is_joint(self) -> bool:
        """Every boundary has to be run: other ranks wait for this one."""
        return self._agreement.is_joint

    def receive(self, command: Command) -> None:
        """Queue a command for the next `run`."""
        self._waiting.append(command)

    def run(self, step: int) -> None:
        """Run the boundary after `step` updates. On an unexpected exception, this rank gives the agreement up, and the
        exception is passed on."""
        if not self.is_due:
            return
        try:
            self._run(step)
        except MustStop as error:
            self._agreement.abandon(str(error))
            if error.command is not None:
                self._dequeue(error.command)
                self._answer(error.command, step, "unknown", str(error))
            self._on_stop(str(error))
        except Exception as error:
            self._agreement.abandon(f"{type(error).__name__}: {error}")
            raise

    def leave(self, step: int, why: str = "the run has ended here before it was begun") -> None:
        """Answer what still waits: this rank runs no boundary after `step` updates."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            if (command.id, command.verb) not in self._answers:  # else it has ended this rank
                self._answer(command, step, "unavailable", why)

    def _run(self, step: int) -> None:
        self._refuse_other_starts(step)
        for pending in self._unconfirmed[:]:
            self._read_back(pending, step)
        ruling = self._agreement.settle(step)
        if ruling is not None:
            self._carry_out(ruling.command, step) if ruling.refusal is None else self._rule(ruling, step)
            self._dequeue(ruling.command)
        self._waiting.sort(key=lambda c: (c.term, c.sequence))
        for ruling in self._agreement.due(self._candidates(step), step):
            self._dequeue(ruling.command)
            self._rule(ruling, step)

    def _refuse_other_starts(self, step: int) -> None:
        """Refuse commands for another start of the run, without a vote: their numbers and ids may equal those of
        commands for this start, whose answers must not be changed."""
        for command in [command for command in self._waiting if command.start != self._start]:
            self._dequeue(command)
            status: Status = "expired" if command.start else "vetoed"
            detail = (
                "decided for another start of this run" if command.start else
                "it does not say for which start of the run: upgrade controller and agent to this version"
            )  # fmt: skip
            logger.warning("fp8watch: step %d: %s %s: %s", step, command.action, status, detail)
            self._send(self._result(command, step, status, detail))

    def _candidates(self, step: int) -> list[Candidate]:
        """The waiting commands, and whether this rank is ready for each. Repeated commands get their answer again."""
        found = []
        for command in self._waiting[:]:
            known = self._answers.get((command.id, command.verb))
            if known is not None and self._journal.knows(command):
                self._waiting.remove(command)
                self._send(known)  # sent again because our answer was lost
                continue
            # A command that is put to the vote now is carried out one boundary later.
            found.append(Candidate(command, self._refusal(command, step + 1 if self.is_joint else step)))
        return found

    def _rule(self, ruling: Ruling, step: int) -> None:
        # An earlier command at this boundary may have started another attempt.
        refusal = ruling.refusal or self._refusal(ruling.command, step)
        if refusal is None:
            self._carry_out(ruling.command, step)
        else:
            self._answer(ruling.command, step, *refusal)

    def _dequeue(self, command: Command) -> None:
        self._waiting = [other for other in self._waiting if other is not command]

    def _refusal(self, command: Command, step: int) -> Refusal | None:
        """Why this rank refuses a command; None: it is ready. A check that fails refuses: an error here would end the
        agreement of all ranks."""
        try:
            return self._checked(command, step)
        except Exception as error:
            logger.warning("fp8watch: %s could not be checked", command.action, exc_info=error)
            return "vetoed", f"whether it may be carried out here could not be checked: {type(error).__name__}: {error}"

    def _checked(self, command: Command, step: int) -> Refusal | None:
        if self._journal.knows(command):
            return "unknown", "begun before; an id is never tried twice"
        if (command.term, command.sequence) <= (self._journal.term, self._journal.sequence):
            return "vetoed", f"term {command.term} sequence {command.sequence} is older than what was begun already"
        if command.attempt != self._attempt():
            return "expired", f"decided for attempt {command.attempt}, this is attempt {self._attempt()}"
        if step > command.last_step:
            return "expired", f"came too late: it had to begin by step {command.last_step}"
        reason = self._disarm.reason(now=True)
        if reason is not None:
            return "vetoed", reason
        if self._mode == "observe":
            return "vetoed", "this run's policy only observes"
        if command.action not in self._actions:
            return "unavailable", f"unknown action {command.action}"
        unavailable = self._agreement.unavailable or self._journal.unavailable
        if unavailable is None and not self._start:
            unavailable = "this start of the run has no name, by which its commands are known"
        if unavailable is None and command.verb == "apply":
            unavailable = self._capabilities().get(command.action)
        if unavailable:
            return "unavailable", unavailable
        objection = self._objection(command)
        return ("vetoed", objection) if objection is not None else None

    def _carry_out(self, command: Command, step: int) -> None:
        action = self._actions.get(command.action)
        try:
            local, joint = self._do_jointly(command, action, step)
        except MustStop as error:
            self._answer(command, step, "unknown", str(error))  # it stays unfinished in the journal
            raise
        except Exception as error:  # not of the action, whose errors are outcomes
            if not self._agreement.is_joint:
                raise
            raise MustStop(
                f"it is unknown what {command.action} came to on the other ranks: {type(error).__name__}: {error}",
                command,
            ) from error
        except BaseException as error:  # KeyboardInterrupt, SystemExit
            # The other ranks wait for an answer or an outcome. The ballot with which a rank leaves has another length,
            # over which gloo would abort their processes.
            reason = f"{command.action} was interrupted by {type(error).__name__}"
            self._agreement.abandon(reason)
            self._answer(command, step, "unknown", reason)
            if self._agreement.is_joint or asks_first(command):
                self._on_stop(reason)
            raise
        if joint.verdict == "same":
            self._conclude(command, action, local, step)
            return
        is_failed = joint.verdict == "undo" or local.outcome is not RankOutcome.DONE
        if is_failed and local.is_begun:
            self._finish(command, "failed")  # with status unknown it stays unfinished in the journal
        why = "; ".join(part for part in (local.detail, joint.detail) if part)
        self._answer(command, step, "failed" if is_failed else "unknown", why)
        if local.broken is not None:
            self._on_broken(local.broken)
        if joint.verdict == "stop":
            self._on_stop(f"{command.action}: {joint.detail}")

    def _do_jointly(self, command: Command, action: Action | None, step: int) -> tuple[LocalResult, JointOutcome]:
        """Carry out a command, compare the outcomes of all ranks, and revert it here if it failed on another one."""
        local = self._do(command, action, step)
        joint = self._agreement.confirm(local.outcome, can_undo=command.verb == "apply" and not asks_first(command))
        if joint.verdict == "undo" and command.verb == "apply" and local.applied is not None and action is not None:
            joint = take_back_here(action, local.applied, joint)
        return local, joint

    def _do(self, command: Command, action: Action | None, step: int) -> LocalResult:
        """Carry out a command. Failures are returned, because other ranks wait for the outcome. Raises `MustStop`."""
        cannot = "" if action is not None else f"unknown action {command.action}"
        if not cannot:
            try:
                self._journal.begin(command, step)
            except Exception as error:
                cannot = f"journal could not be synced, nothing was done: {error}"
        if asks_first(command):
            cannot = agree_on_target(self._agreement, action, command, step, cannot)
        if cannot or action is None:
            return LocalResult(outcome=RankOutcome.FAILED, detail=cannot, is_begun=self._journal.knows(command))
        return carry_out(command, action, step, self._applied)

    def _conclude(self, command: Command, action: Action | None, local: LocalResult, step: int) -> None:
        """Record and answer the outcome, which is the same on all ranks."""
        if local.is_begun:
            self._finish(command, "applied" if local.outcome is RankOutcome.DONE else "failed")
        if local.outcome is not RankOutcome.DONE or action is None:
            self._answer(command, step, "failed", local.detail)
            if local.broken is not None:
                self._on_broken(local.broken)
        elif local.applied is not None:
            if command.verb == "revert":
                target = str(command.params.get("of", command.id))
                self._unconfirmed = [pending for pending in self._unconfirmed if pending.command.id != target]
                logger.warning("fp8watch: step %d: reverted %s", step, command.action)
                self._answer(command, step, "applied")
            else:
                self._applied[command.id] = settled(local.applied)
                done = action_words.named(command.action, command.params)
                logger.warning("fp8watch: step %d: applied %s", step, done)
                self._answer(
                    command, step, "applied", replayed=local.applied.steps_replayed, observed=local.applied.expected
                )  # fmt: skip
            pending = _Unconfirmed(command, action, settled(local.applied), step)
            self._unconfirmed.append(pending)
            self._read_back(pending, step)

    def _read_back(self, pending: _Unconfirmed, step: int) -> None:
        pending.num_read_backs += 1
        try:
            found = pending.read_back()
            ok, observed, detail = found.ok, found.observed, found.detail
        except Exception as error:
            logger.warning("fp8watch: read-back of %s failed", pending.command.action, exc_info=error)
            ok, observed, detail = False, {}, f"read-back failed: {type(error).__name__}: {error}"
        if ok is None:
            patience: int = getattr(pending.action, "patience", READBACK_STEPS)
            if pending.num_read_backs < patience:
                return
            done = "undone" if pending.command.verb == "revert" else "in force"
            ok, detail = False, f"not {done} {patience} boundaries later: {detail or 'no effect was seen'}"
        self._unconfirmed.remove(pending)
        self._answer(
            pending.command, pending.step, "applied", detail, readback="ok" if ok else "failed",
            observed=observed, replayed=pending.applied.steps_replayed if pending.command.verb == "apply" else 0,
        )  # fmt: skip

    def _finish(self, command: Command, status: str) -> None:
        try:
            self._journal.finish(command, status)
        except OSError as error:
            logger.warning("fp8watch: journal: %s", error)

    def _answer(
        self,
        command: Command,
        step: int,
        status: Status,
        detail: str = "",
        *,
        readback: Literal["ok", "failed", "pending"] = "pending",
        observed: dict[str, Any] | None = None,
        replayed: int = 0,
    ) -> None:
        if status != "applied":
            logger.warning("fp8watch: step %d: %s %s: %s", step, command.action, status, detail)
        result = self._result(
            command, step, status, detail, readback=readback, observed=observed or {}, steps_replayed=replayed
        )  # fmt: skip
        self._answers[command.id, command.verb] = result
        self._send(result)

    def _result(self, command: Command, step: int, status: Status, detail: str, **more: Any) -> CommandResult:
        return CommandResult(
            id=command.id, run=command.run, attempt=command.attempt, rank=self._rank, verb=command.verb,
            step=step, status=status, detail=detail, start=command.start, **more,
        )  # fmt: skip

    def report_unfinished(self, run: str, attempt: int) -> None:
        """Report commands as unknown that an earlier process of this rank began and did not finish."""
        for left in self._journal.unfinished:
            verb: Verb = left.verb
            self._send(
                CommandResult(
                    id=left.id, run=run, attempt=attempt, rank=self._rank, verb=verb, step=left.step,
                    status="unknown", detail="the process ended while it was carried out", start=left.start,
                )
            )  # fmt: skip
