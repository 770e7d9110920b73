"""Which commands all ranks carry out now: the interface of the step boundary, and its implementation for one process.

A boundary first reads the result of the vote that the previous boundary started, carries the command out, and compares
the outcome over ranks. Then it starts the next vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

from fp8watch.records import Command

Status = Literal["applied", "failed", "vetoed", "expired", "unavailable", "unknown"]
Refusal = tuple[Status, str]
"""Status and reason to answer with instead of carrying a command out."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A command that waits on this rank. `refusal` None: this rank is ready to carry it out."""

    command: Command
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision on a command. `refusal` None: every rank carries it out at this boundary."""

    command: Command
    refusal: Refusal | None = None


class RankOutcome(IntEnum):
    """Outcome of a command on this rank. The order matters: the minimum over ranks is taken."""

    UNKNOWN = 0
    """It failed, and something may still be changed."""
    FAILED = 1
    """It failed with nothing changed."""
    DONE = 2


@dataclass(frozen=True, slots=True)
class JointOutcome:
    """Outcome of a command over all ranks, and what this rank has to do next."""

    verdict: Literal["same", "undo", "stop"]
    """same: all ranks are in the same state. undo: another rank failed, so revert the command here. stop: ranks may be
    in different states, so this one must not make another optimizer step."""
    detail: str = ""


ASK_FIRST = frozenset({"rollback"})
"""Actions that cannot be reverted. All ranks check that they can carry one out before any overwrites anything."""


def asks_first(command: Command) -> bool:
    """Whether ranks ask each other first (`fp8watch.actions.joint`)."""
    return command.verb == "apply" and command.action in ASK_FIRST


class Agreement(Protocol):
    """Decides at each boundary which verified commands all ranks carry out now."""

    unavailable: str | None
    """Why no command can be carried out in this run; None: commands can be."""
    is_joint: bool
    """Whether other ranks take part. If so, every boundary has to be run, also one without commands."""

    def settle(self, step: int) -> Ruling | None:
        """Wait for the result of the previous boundary's vote. None: no command was decided. Raises `MustStop`."""

    def confirm(self, outcome: RankOutcome, *, can_undo: bool) -> JointOutcome:
        """Wait for the outcome of a command on all ranks. `can_undo`: it can be reverted on this rank."""

    def lowest(self, answer: int, about: str) -> int:
        """Wait for the lowest answer of all ranks to a question that each of them asks now. 0 when `about` differs
        between ranks. Raises `MustStop` when the answers are lost."""

    def due(self, candidates: Sequence[Candidate], step: int) -> list[Ruling]:
        """Start the next vote; commands come up in the order of their numbers. Returns decisions that need no vote."""

    def abandon(self, reason: str) -> None:
        """End this rank's part after an error, so that no other rank waits for it."""

    def leave(self, step: int) -> None:
        """Tell the other ranks, without waiting, that this one runs no boundary after `step` updates."""

    def close(self) -> None:
        """Wait, within limits, until the other ranks have received what was sent."""


class MustStop(Exception):
    """Other ranks may have carried out a command that this one has not: no further optimizer step may be made."""

    def __init__(self, reason: str, command: Command | None = None) -> None:
        """`command`: the one in question, if it is still to be answered."""
        super().__init__(reason)
        self.command = command


class SingleProcess:
    """The agreement of a run with one process: every command is decided at once."""

    unavailable: str | None = None
    is_joint = False

    def settle(self, step: int) -> Ruling | None:
        """None: `due` decides everything."""
        return None

    def confirm(self, outcome: RankOutcome, *, can_undo: bool) -> JointOutcome:
        """Always `same`."""
        return JointOutcome("same")

    def lowest(self, answer: int, about: str) -> int:
        """This rank's answer."""
        return answer

    def due(self, candidates: Sequence[Candidate], step: int) -> list[Ruling]:
        """All candidates, refused ones first."""
        rulings = [Ruling(candidate.command, candidate.refusal) for candidate in candidates]
        return sorted(rulings, key=lambda ruling: ruling.refusal is None)

    def abandon(self, reason: str) -> None:
        """Nothing to do."""

    def leave(self, step: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class ObserveOnly(SingleProcess):
    """Refuses every command. `reason` None: the run's policy only observes."""

    def __init__(self, reason: str | None) -> None:
        self.unavailable = reason

    def due(self, candidates: Sequence[Candidate], step: int) -> list[Ruling]:
        """A refusal of every candidate."""
        reason = self.unavailable or "this run only observes"
        return [Ruling(c.command, c.refusal or ("unavailable", reason)) for c in candidates]
