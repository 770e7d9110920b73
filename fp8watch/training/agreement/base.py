"""What the step boundary asks: is this command carried out now, by everybody? And the answer for one process.

A boundary first settles what the last one has put to the vote, carries it out, and confirms that everybody did;
then it puts the next candidate to the vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

from fp8watch.records import Command

Status = Literal["applied", "failed", "vetoed", "expired", "unavailable", "unknown"]
Refusal = tuple[Status, str]
"""What to answer instead of carrying a command out, and why."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A command that waits on this rank; `refusal` None: this rank is ready to carry it out."""

    command: Command
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """The end of a command's waiting; `refusal` None: it is carried out at this boundary, by every rank."""

    command: Command
    refusal: Refusal | None = None


class Fate(IntEnum):
    """What became of a command on this rank. The order matters: ranks take the lowest."""

    UNKNOWN = 0
    """It failed in a way that no action promises: what was changed is not known."""
    FAILED = 1
    """It failed with nothing changed."""
    DONE = 2


@dataclass(frozen=True, slots=True)
class Joint:
    """What became of a command on all ranks, and what this rank has to do about it."""

    verdict: Literal["same", "undo", "stop"]
    """same: every rank is where this one is. undo: another rank failed, so take it back here. stop: nobody knows
    whether the ranks are in the same state, so no further optimizer step is made."""
    detail: str = ""


ASK_FIRST = frozenset({"rollback"})
"""Actions that cannot be taken back: ranks ask each other whether they can before anything is overwritten."""


def asks_first(command: Command) -> bool:
    """Whether questions come before it is carried out (`fp8watch.actions.joint`)."""
    return command.verb == "apply" and command.action in ASK_FIRST


class Agreement(Protocol):
    """Decides at each boundary which verified commands all ranks carry out now."""

    unavailable: str | None
    """Why nothing can be agreed upon in this run; None: it can."""
    is_joint: bool
    """Whether others take part: then every boundary counts, also one with nothing to do."""

    def settle(self, step: int) -> Ruling | None:
        """What came of the last boundary's vote; waits for it. Raises `MustStop`."""

    def confirm(self, fate: Fate, *, can_undo: bool) -> Joint:
        """Compare what carrying out a command came to; waits. `can_undo`: it could be taken back here."""

    def lowest(self, answer: int, about: str) -> int:
        """The lowest of all ranks' answers to a question that all of them are asked now; waits. 0 when they speak of
        different things. Raises `MustStop` when it will never be known."""

    def due(self, candidates: Sequence[Candidate], step: int) -> list[Ruling]:
        """Put what waits, in the order of its numbers, to the vote; what is ruled upon at once."""

    def abandon(self, reason: str) -> None:
        """This rank cannot take part any more: let no other rank wait for it."""

    def leave(self, step: int) -> None:
        """No further boundary follows after `step` updates: say so to the others, without waiting."""

    def close(self) -> None:
        """Wait, within limits, until what is under way has reached the others."""


class MustStop(Exception):
    """Other ranks may have carried out what this one has not: it must not make another optimizer step."""


class SingleProcess:
    """One process agrees with itself, at once."""

    unavailable: str | None = None
    is_joint = False

    def settle(self, step: int) -> Ruling | None:
        """Nothing is ever put off."""
        return None

    def confirm(self, fate: Fate, *, can_undo: bool) -> Joint:
        """There is nobody to differ from."""
        return Joint("same")

    def lowest(self, answer: int, about: str) -> int:
        """This one's."""
        return answer

    def due(self, candidates: Sequence[Candidate], step: int) -> list[Ruling]:
        """All of them, what is refused first."""
        rulings = [Ruling(candidate.command, candidate.refusal) for candidate in candidates]
        return sorted(rulings, key=lambda ruling: ruling.refusal is None)

    def abandon(self, reason: str) -> None:
        """Nobody waits."""

    def leave(self, step: int) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is under way."""


class ObserveOnly(SingleProcess):
    """Nothing is ever carried out: for `reason`, or (None) because this run's policy only observes."""

    def __init__(self, reason: str | None) -> None:
        self.unavailable = reason

    def due(self, candidates: Sequence[Candidate], step: int) -> list[Ruling]:
        """None of them."""
        reason = self.unavailable or "this run only observes"
        return [Ruling(c.command, c.refusal or ("unavailable", reason)) for c in candidates]
