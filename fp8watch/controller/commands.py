"""Commands on their way: one at a time a run, numbered, expiring in steps, answered by every rank.

A command is done when all ranks have said what became of it and what they read back. No answer in time is an
answer too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fp8watch.policy.view import Trouble
from fp8watch.records import Command, CommandResult, Verb

EXPIRY_STEPS = 50
"""A command that no rank began within so many steps is not begun any more."""
READBACK_STEPS = 30
"""Steps after the expiry by which the read-back has to be in."""

Result = Literal["applied", "failed", "vetoed", "expired", "unavailable"]


MAX_TENSORS = 16
"""Tensors that a command names as its reason."""


def because_of(trouble: Trouble | None) -> dict[str, Any]:
    """What a command rests on, for the ranks to compare with what they have seen."""
    if trouble is None:
        return {}
    found: dict[str, Any] = {"onset_step": trouble.onset_step, "tensors": list(trouble.tensors[:MAX_TENSORS])}
    return found if trouble.rank is None else {**found, "rank": trouble.rank}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What a command came to on all ranks together."""

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


class CommandDesk:
    """Gives out commands and gathers their results."""

    def __init__(self, run: str, term: int) -> None:
        self._run = run
        self.term = term
        self._sequence = 0
        self._outstanding: _Outstanding | None = None
        self.unmatched = 0
        """Results of no command that is on its way: late, repeated, or of another controller."""

    @property
    def current(self) -> Command | None:
        """The command on its way."""
        return self._outstanding.command if self._outstanding is not None else None

    def issue(
        self, action_id: str, verb: Verb, action: str, params: dict[str, Any], *, step: int, seen: int, attempt: int,
        ranks: frozenset[int], because: dict[str, Any] | None = None,
    ) -> Command:  # fmt: skip
        """A new command. One must not be on its way already.

        Its id is the action's, by which the ranks know what to undo; an undoing in part has an id of its own and
        names the action in `of`.
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
        )
        deadline = seen + EXPIRY_STEPS + READBACK_STEPS
        self._outstanding = _Outstanding(command=command, action_id=action_id, ranks=ranks, deadline_seen=deadline)
        return command

    def learn_term(self, term: int) -> None:
        """A rank has begun commands of this term: number anew under a higher one, or it takes ours for old ones."""
        self.term, self._sequence = term + 1, 0

    @property
    def has_issued(self) -> bool:
        """Whether a command was given under the present term."""
        return self._sequence > 0

    def is_applied(self, ranks: frozenset[int]) -> bool:
        """Whether every rank that is still there says it has applied the command on its way."""
        waiting = self._outstanding
        if waiting is None:
            return False
        expected = waiting.ranks & ranks or waiting.ranks
        answers = [waiting.results.get(rank) for rank in expected]
        return all(answer is not None and answer.status == "applied" for answer in answers)

    def take(self, result: CommandResult) -> CommandResult | None:
        """Note a rank's answer; the same if it belongs to the command on its way, else None."""
        current = self.current
        if self._outstanding is None or current is None or (result.id, result.verb) != (current.id, current.verb):
            self.unmatched += 1
            return None
        self._outstanding.results[result.rank] = result
        return result

    def conclude(self, seen: int, ranks: frozenset[int]) -> Conclusion | None:
        """What the command came to, once that is known. `ranks`: those still there."""
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
    """One rank's read-back; of a check that ranks may come out of differently, that of the first whose runs differ."""
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
