"""Commands on their way: one at a time per run, numbered, expiring in steps, answered by every rank.

A command is done when all ranks have reported what became of it and what they read back. No answer in time is an answer
too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fp8watch.policy.view import Trouble
from fp8watch.records import Command, CommandResult, Verb

EXPIRY_STEPS = 50
"""A command that no rank has begun within this many steps is not begun any more."""
READBACK_STEPS = 30
"""Steps after the expiry by which the read-back must have arrived."""

Result = Literal["applied", "failed", "vetoed", "expired", "unavailable"]


MAX_TENSORS = 16
"""Most tensors that a command names as its reason."""


def because_of(trouble: Trouble | None) -> dict[str, Any]:
    """What a command rests on, for the ranks to compare with what they have seen."""
    if trouble is None:
        return {}
    found: dict[str, Any] = {"onset_step": trouble.onset_step, "tensors": list(trouble.tensors[:MAX_TENSORS])}
    return found if trouble.rank is None else {**found, "rank": trouble.rank}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The result of a command on all ranks together."""

    command: Command
    action_id: str
    result: Result
    step: int | None
    readback: Literal["ok", "failed", "pending"]
    detail: str
    observed: dict[str, Any]
    steps_replayed: int = 0


@dataclass(slots=True, kw_only=True)
class _Outstanding:
    command: Command
    action_id: str
    ranks: frozenset[int]
    deadline_seen: int
    results: dict[int, CommandResult] = field(default_factory=dict)


class CommandTracker:
    """Issues commands and gathers their results."""

    def __init__(self, run: str, term: int) -> None:
        self._run = run
        self.term = term
        self._sequence = 0
        self._outstanding: _Outstanding | None = None

    @property
    def current(self) -> Command | None:
        """The command on its way; None: there is none."""
        return self._outstanding.command if self._outstanding is not None else None

    def issue(
        self, action_id: str, verb: Verb, action: str, params: dict[str, Any], *, step: int, seen: int, attempt: int,
        ranks: frozenset[int], because: dict[str, Any] | None = None, start: str = "",
    ) -> Command:  # fmt: skip
        """Issue a command. No other may be on its way.

        Its id is that of the action, by which the ranks know what to undo. A partial undoing has an id of its own and
        names the action in `of`. `start`: the processes that it is for (`Hello.start`).
        """
        assert self._outstanding is None, "one command at a time"
        self._sequence += 1
        is_partial = verb == "revert" and "of" in params
        command = Command(
            id=f"{action_id}/{self._sequence}" if is_partial else action_id,
            run=self._run,
            attempt=attempt,
            term=self.term,
            sequence=self._sequence,
            verb=verb,
            action=action,
            params=params,
            last_step=step + EXPIRY_STEPS,
            because=because or {},
            start=start,
        )
        deadline = seen + EXPIRY_STEPS + READBACK_STEPS
        self._outstanding = _Outstanding(command=command, action_id=action_id, ranks=ranks, deadline_seen=deadline)
        return command

    def learn_term(self, term: int) -> None:
        """A rank has begun commands of this term: continue under a higher one, or it would take ours for old
        commands."""
        self.term, self._sequence = term + 1, 0

    @property
    def has_issued(self) -> bool:
        """Whether a command was issued under the current term."""
        return self._sequence > 0

    def is_applied(self, ranks: frozenset[int]) -> bool:
        """Whether every rank that is still present reports that it has applied the current command."""
        waiting = self._outstanding
        if waiting is None:
            return False
        expected = waiting.ranks & ranks or waiting.ranks
        answers = [waiting.results.get(rank) for rank in expected]
        return all(answer is not None and answer.status == "applied" for answer in answers)

    def take(self, result: CommandResult) -> CommandResult | None:
        """Record a rank's answer. Returns None when it does not belong to the command on its way: it is late, repeated,
        or for another controller's command, or one for another start, which may have had the same id."""
        current = self.current
        if self._outstanding is None or current is None:
            return None
        if (result.id, result.verb, result.start) != (current.id, current.verb, current.start):
            return None
        self._outstanding.results[result.rank] = result
        return result

    def conclude(self, seen: int, ranks: frozenset[int]) -> Conclusion | None:
        """The result of the command, once it is known. `ranks`: those still present."""
        waiting = self._outstanding
        if waiting is None:
            return None
        expected = waiting.ranks & ranks or waiting.ranks
        answers = [waiting.results[rank] for rank in sorted(expected) if rank in waiting.results]
        is_final = len(answers) == len(expected) and all(_is_final(answer) for answer in answers)
        if not is_final and seen <= waiting.deadline_seen and ranks:
            return None
        self._outstanding = None
        return _summary(waiting.command, waiting.action_id, answers, is_complete=len(answers) == len(expected))


def _is_final(result: CommandResult) -> bool:
    return result.status != "applied" or result.readback != "pending"


def _summary(command: Command, action_id: str, answers: list[CommandResult], *, is_complete: bool) -> Conclusion:
    bad = [answer for answer in answers if answer.status != "applied"]
    applied = [answer for answer in answers if answer.status == "applied"]
    unread = [answer for answer in applied if answer.readback != "ok"]
    result: Result = "applied"
    readback: Literal["ok", "failed", "pending"] = "ok"
    detail = next((answer.detail for answer in [*bad, *unread, *applied] if answer.detail), "")
    if not answers:
        result, readback, detail = "expired", "pending", "no rank answered in time"
    elif bad:
        status = bad[0].status
        result = "failed" if status in {"unknown", "applied"} else status  # type: ignore[assignment]
        readback = "failed" if applied else "pending"
    elif unread or not is_complete:
        result, readback = "failed", "failed"
        detail = detail or "not read back in time"
    return Conclusion(
        command=command,
        action_id=action_id,
        result=result,
        step=applied[0].step if applied else (bad[0].step if bad else None),
        readback=readback,
        detail=detail,
        observed=_observed(unread or applied),
        steps_replayed=max((answer.steps_replayed for answer in applied), default=0),
    )


def _observed(answers: list[CommandResult]) -> dict[str, Any]:
    """One rank's read-back. For a recheck, on which ranks may differ: that of the first rank whose two runs differ."""
    if not answers:
        return {}
    apart = next((answer for answer in answers if answer.observed.get("agree") is False), None)
    if apart is not None and len(answers) > 1:
        return {**apart.observed, "rank": apart.rank}
    return dict((apart or answers[0]).observed)


def failure_of(conclusion: Conclusion) -> str:
    """Why an action failed, in words."""
    if conclusion.readback == "failed":
        return f"{conclusion.command.action} was not in force when read back: {conclusion.detail}"
    return f"{conclusion.command.action} {conclusion.result}: {conclusion.detail}"
