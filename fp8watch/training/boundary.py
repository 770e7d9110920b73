"""The step boundary: which commands are due, are they carried out, and is what they did really in force.

Order at each boundary: read back what earlier boundaries applied, then begin what is due, oldest first. A command
is written to the journal and synced before it touches anything. Each answer names the step and the reason; a
command that is not carried out (expired, refused, disarmed, unavailable) is answered too, so that nobody waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fp8watch.actions.base import Action, Applied
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.errors import ActionError, CheckpointError
from fp8watch.records import Command, CommandResult, Mode, Verb
from fp8watch.training.agreement import Agreement
from fp8watch.training.disarm import Disarm
from fp8watch.training.journal import Journal

logger = logging.getLogger(__name__)

READBACK_STEPS = 8
"""Boundaries at which an effect that is not visible yet is looked for again. Most show after one step; a switch
that needs a forward of its module may wait for an evaluation to end."""

Status = Literal["applied", "failed", "vetoed", "expired", "unavailable", "unknown"]


@dataclass(slots=True)
class _Watched:
    """An applied command whose effect is not confirmed yet."""

    command: Command
    action: Action
    applied: Applied
    step: int
    looks: int = 0


class Boundary:
    """Carries out one rank's commands. Runs on the training thread; lets no exception out."""

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
        on_broken: Callable[[str], None],
    ) -> None:
        """`on_broken` is told when an action has left the training state mixed: it must not be trained on."""
        self._rank = rank
        self._actions = actions
        self._capabilities = capabilities
        self._journal = journal
        self._agreement = agreement
        self._disarm = disarm
        self._mode = mode
        self._send = send
        self._attempt = attempt
        self._on_broken = on_broken
        self._waiting: list[Command] = []
        self._watched: list[_Watched] = []
        self._applied: dict[str, Applied] = {}
        self._answers: dict[tuple[str, str], CommandResult] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing to do at the next boundary."""
        return not self._waiting and not self._watched

    def receive(self, command: Command) -> None:
        """Take in a command; it is looked at in the next `run`."""
        self._waiting.append(command)

    def run(self, step: int) -> None:
        """One boundary, after `step` updates."""
        if self.is_idle:
            return
        for watched in self._watched[:]:
            self._look(watched, step)
        waiting, self._waiting = sorted(self._waiting, key=lambda c: (c.term, c.sequence)), []
        ready = []
        for command in waiting:
            known = self._answers.get((command.id, command.verb))
            if known is not None and self._journal.knows(command):
                self._send(known)  # sent twice because our answer was lost
                continue
            refusal = self._refusal(command, step)
            if refusal is None:
                ready.append(command)
            else:
                self._answer(command, step, *refusal)
        for command in self._agreement.due(ready, step):
            # What came before it at this boundary may have started another attempt.
            refusal = self._refusal(command, step)
            if refusal is None:
                self._carry_out(command, step)
            else:
                self._answer(command, step, *refusal)

    def _refusal(self, command: Command, step: int) -> tuple[Status, str] | None:
        if self._journal.knows(command):
            return "unknown", "begun before; an id is never tried twice"
        if (command.term, command.sequence) <= (self._journal.term, self._journal.sequence):
            return "vetoed", f"term {command.term} sequence {command.sequence} is older than what was begun already"
        if command.attempt != self._attempt():
            return "expired", f"decided for attempt {command.attempt}, this is attempt {self._attempt()}"
        if step > command.last_step:
            return "expired", f"not to be begun after step {command.last_step}"
        reason = self._disarm.reason(now=True)
        if reason is not None:
            return "vetoed", reason
        if self._mode == "observe":
            return "vetoed", "this run's policy only observes"
        if command.action not in self._actions:
            return "unavailable", f"unknown action {command.action}"
        unavailable = self._agreement.unavailable or self._journal.unavailable
        if unavailable is None and command.verb == "apply":
            unavailable = self._capabilities().get(command.action)
        return ("unavailable", unavailable) if unavailable else None

    def _carry_out(self, command: Command, step: int) -> None:
        action = self._actions[command.action]
        try:
            self._journal.begin(command, step)
        except OSError as error:
            self._answer(command, step, "failed", f"journal could not be synced, nothing was done: {error}")
            return
        try:
            if command.verb == "revert":
                self._revert(command, action, step)
            else:
                self._apply(command, action, step)
        except PartlyRestored as error:
            self._finish(command, "failed")
            self._answer(command, step, "failed", str(error))
            self._on_broken(f"{command.action}: {error}")
        except (ActionError, CheckpointError) as error:
            self._finish(command, "failed")
            self._answer(command, step, "failed", str(error))
        except Exception as error:
            logger.warning("fp8watch: %s failed", command.action, exc_info=error)
            self._finish(command, "failed")
            self._answer(command, step, "failed", f"{type(error).__name__}: {error}")

    def _apply(self, command: Command, action: Action, step: int) -> None:
        applied = action.apply(step, dict(command.params))
        self._applied[command.id] = applied
        self._finish(command, "applied")
        logger.warning("fp8watch: step %d: applied %s %s", step, command.action, command.params)
        watched = _Watched(command, action, applied, step)
        self._answer(command, step, "applied", replayed=applied.steps_replayed, observed=applied.expected)
        self._watched.append(watched)
        self._look(watched, step)

    def _revert(self, command: Command, action: Action, step: int) -> None:
        # A return of some layers only is a command with an id of its own that names the one it undoes.
        target = str(command.params.get("of", command.id))
        applied = self._applied.get(target)
        if applied is None:
            raise ActionError(f"{target} was not applied by this process, so it cannot be undone here")
        if "layers" in command.params:
            applied = replace(applied, params={**applied.params, "layers": command.params["layers"]})
        action.revert(applied)
        self._watched = [watched for watched in self._watched if watched.command.id != target]
        self._finish(command, "applied")
        logger.warning("fp8watch: step %d: reverted %s", step, command.action)
        self._answer(command, step, "applied", readback="ok")

    def _look(self, watched: _Watched, step: int) -> None:
        watched.looks += 1
        try:
            found = watched.action.read_back(watched.applied)
            ok, observed, detail = found.ok, found.observed, found.detail
        except Exception as error:
            logger.warning("fp8watch: read-back of %s failed", watched.command.action, exc_info=error)
            ok, observed, detail = False, {}, f"read-back failed: {type(error).__name__}: {error}"
        if ok is None:
            if watched.looks < READBACK_STEPS:
                return
            ok, detail = False, f"not in force {READBACK_STEPS} boundaries later: {detail or 'no effect was seen'}"
        self._watched.remove(watched)
        self._answer(
            watched.command, watched.step, "applied", detail, readback="ok" if ok else "failed",
            observed=observed, replayed=watched.applied.steps_replayed,
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
        result = CommandResult(
            id=command.id, run=command.run, attempt=command.attempt, rank=self._rank, verb=command.verb,
            step=step, status=status, readback=readback, detail=detail, observed=observed or {},
            steps_replayed=replayed,
        )  # fmt: skip
        self._answers[command.id, command.verb] = result
        self._send(result)

    def report_unfinished(self, run: str, attempt: int) -> None:
        """Tell of commands that an earlier process of this rank began and did not finish."""
        for left in self._journal.unfinished:
            verb: Verb = left.verb
            self._send(
                CommandResult(
                    id=left.id, run=run, attempt=attempt, rank=self._rank, verb=verb, step=left.step,
                    status="unknown", detail="the process ended while it was carried out",
                )
            )  # fmt: skip
