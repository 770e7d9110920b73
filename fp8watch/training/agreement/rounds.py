"""The protocol by which all ranks carry out a command at one boundary, or none does. Pure: no clock, network or torch.

At each boundary every rank casts one ballot: the number of the command it would begin, and whether it refuses it. The
ballots are reduced to their element-wise minimum. The result is known at the next boundary and is the same on every
rank that receives it. A command is carried out when every rank named it, with the same content, and none refused it.
A ballot is binding: a rank that voted for a command carries it out at the next boundary, whatever it has learnt since.

Ranks must name the same number; "all commands up to number n" would not do. A restarted controller numbers its commands
anew under a higher term, so a rank cannot know that it has missed one.

A rank names the lowest number that it holds. If all ranks name one and the numbers differ, the rank with the highest
holds none below it. So no lower number can be agreed on, and in the next round all ranks name their lowest number from
the highest one on. A command that never reaches one rank therefore does not block the next command that all ranks hold.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fp8watch.records import Command
from fp8watch.training.agreement.base import Candidate, JointOutcome, RankOutcome, Ruling

_DIGEST_BITS = 62
"""Digests are compared as signed 64-bit numbers, which also have to be negated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One rank's vote in one round."""

    rank: int
    step: int
    """Updates done at the boundary of this ballot. Ranks with different step counts cannot agree."""
    key: int = 0
    """`number` of the command that the rank would begin; 0: none."""
    digest: int = 0
    is_refused: bool = False
    is_leaving: bool = False

    def pack(self) -> list[int]:
        """Eight int64 numbers, to be reduced to their minimum over ranks. A number and its negative give both the
        minimum and the maximum."""
        return [
            self.key, -self.key, self.digest, -self.digest, self.step, -self.step,
            -(self.rank + 1) if self.is_refused else 0, -(self.rank + 1) if self.is_leaving else 0,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The result of a round: the minimum over all ballots."""

    key: int
    """The number that every rank named; 0: they named different ones, or none."""
    gap: int
    """The highest number named, if every rank named one and they differ: no lower command is on all ranks. Else 0."""
    is_same_content: bool
    is_same_step: bool
    refused_by: int | None
    """The highest rank that refuses the command that it named."""
    left: int | None
    """The highest rank that leaves."""

    @classmethod
    def read(cls, reduced: Sequence[int]) -> Tally:
        """Unpack the reduced numbers of `Ballot.pack`."""
        low, high, digest, digest_high, step, step_high, refused, leaving = reduced
        return cls(
            key=low if low == -high else 0,
            gap=-high if 0 < low < -high else 0,
            is_same_content=digest == -digest_high,
            is_same_step=step == -step_high,
            refused_by=-refused - 1 if refused else None,
            left=-leaving - 1 if leaving else None,
        )


def number(command: Command) -> int:
    """Term and sequence as one number, in the order in which the controller issues commands."""
    return (command.term << 32) | command.sequence


def digest(command: Command) -> int:
    """Hash of all fields of a command; never 0."""
    content = msgspec.json.encode(command, order="deterministic")
    found = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return found >> (64 - _DIGEST_BITS) | 1


class Rounds:
    """One rank's side of the rounds. `vote` and `count` alternate until `over` is set."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._named: Candidate | None = None
        self._floor = 0
        self._start = 0
        self._ruled: set[int] = set()
        self.over: str | None = None
        """Why voting has ended; None: it has not."""
        self.is_open = False
        """Whether a ballot was cast and its round is not counted yet."""
        self.left: int | None = None
        """The rank that ended the rounds by leaving."""

    def vote(self, candidates: Sequence[Candidate], step: int) -> tuple[Ballot, list[Ruling]]:
        """The ballot of the boundary after `step` updates, and the decisions that need no vote.

        These refuse commands that have expired (every rank counts the same steps), were decided before, were overtaken
        by a later command, or are of an older term than another candidate.
        """
        rulings, left = [], []
        newest = max((c.command.term for c in candidates), default=0)
        for candidate in sorted(candidates, key=lambda c: number(c.command)):
            command, refusal = candidate.command, candidate.refusal
            if number(command) in self._ruled:
                rulings.append(Ruling(command, ("vetoed", "ruled on before")))
            elif number(command) <= self._floor:
                rulings.append(Ruling(command, ("expired", "a later command came to all ranks before this one did")))
            elif command.term < newest:
                rulings.append(Ruling(command, ("vetoed", f"given under term {command.term}, now it is {newest}")))
            elif refusal is not None and refusal[0] == "expired":
                rulings.append(Ruling(command, refusal))
            else:
                left.append(candidate)
        self._named = next((c for c in left if number(c.command) >= self._start), None)
        self.is_open = True
        if self._named is None:
            return Ballot(rank=self._rank, step=step), rulings
        named = self._named.command
        ballot = Ballot(
            rank=self._rank, step=step, key=number(named), digest=digest(named),
            is_refused=self._named.refusal is not None,
        )  # fmt: skip
        return ballot, rulings

    def count(self, reduced: Sequence[int]) -> Ruling | None:
        """End a round. Returns the decision on this rank's command, or None when that waits on."""
        tally, named = Tally.read(reduced), self._named
        self._named, self.is_open = None, False
        # Without a gap, start again at the lowest: a missing command may have arrived.
        self._start = tally.gap
        if tally.left is not None:
            self.left = tally.left
            self.over = f"rank {tally.left} has left the run"
            return None
        if not tally.is_same_step:
            self.over = "the ranks count different steps"
            return None
        if named is None or tally.key != number(named.command):
            return None
        self._floor = tally.key
        self._ruled.add(tally.key)
        if not tally.is_same_content:
            return Ruling(named.command, ("vetoed", "the ranks hold different commands under this number"))
        if tally.refused_by is not None:
            other = f"refused by rank {tally.refused_by}, so no rank begins it"
            return Ruling(named.command, named.refusal or ("vetoed", other))
        return Ruling(named.command)

    def lose(self, reason: str) -> Command | None:
        """End voting because a round's result is lost. Returns the command that other ranks may begin now, if any.

        That can only be one that this rank has voted for.
        """
        named = self._named
        self._named, self.is_open = None, False
        self.over = self.over or reason
        return named.command if named is not None and named.refusal is None else None

    def leave(self, step: int) -> Ballot:
        """The last ballot of a rank that makes no further step. It is for the boundary after `step` updates."""
        self.over = self.over or "this rank has left the run"
        return Ballot(rank=self._rank, step=step, is_leaving=True)


def pack_outcome(rank: int, outcome: RankOutcome, *, can_undo: bool) -> list[int]:
    """Outcome of a command: four int64 numbers, to be reduced to their minimum over ranks."""
    is_done = outcome == RankOutcome.DONE
    return [outcome, -outcome, int(can_undo or not is_done), 0 if is_done else -(rank + 1)]


def pack_answer(answer: int, about: str) -> list[int]:
    """Answer to a question: four int64 numbers, to be reduced to their minimum over ranks."""
    topic = int.from_bytes(hashlib.blake2b(about.encode(), digest_size=8).digest(), "big") >> (64 - _DIGEST_BITS) | 1
    return [answer, topic, -topic, 0]


def read_answer(reduced: Sequence[int]) -> int:
    """The lowest answer, from the reduced numbers of `pack_answer`; 0 when ranks answered different questions."""
    return reduced[0] if reduced[1] == -reduced[2] else 0


NO_NORM = 2**63 - 1
"""Placeholder for the norm of another stage: the largest int64, so that any norm replaces it. Reads as NaN."""


def pack_verdict(
    *,
    is_bad: bool = False,
    may_act: bool = True,
    left: int | None = None,
    norm: tuple[int, float] | None = None,
    stages: int = 1,
) -> list[int]:
    """What ranks exchange before an optimizer step: three int64 numbers, and in a pipeline one more per stage, to be
    reduced to their minimum over ranks.

    `left`: this rank, if it leaves. `norm`: (stage, norm of its gradients). The bits of non-negative floats compare as
    the floats do, with infinity and then NaN above all numbers.
    """
    places = [NO_NORM] * stages if stages > 1 else []
    if norm is not None and places:
        places[norm[0]] = struct.unpack("<q", struct.pack("<d", abs(norm[1])))[0]
    return [-int(is_bad), int(may_act), 0 if left is None else -(left + 1), *places]  # fmt: skip


def read_norms(reduced: Sequence[int]) -> list[float]:
    """The norm of each stage, from the reduced numbers of `pack_verdict`; NaN if no rank of the stage gave one."""
    return [struct.unpack("<d", struct.pack("<q", bits))[0] for bits in reduced[3:]]


CANNOT = [0, 0, 0, 0]
"""Answer of a leaving rank to any question: it cannot take part."""

ABSTAINS = [int(RankOutcome.DONE), -int(RankOutcome.UNKNOWN), 1, 0]
"""Outcome reported by a leaving rank, which carries nothing out: it changes no minimum."""


def compare(outcome: RankOutcome, reduced: Sequence[int]) -> JointOutcome:
    """What a rank with this outcome has to do, from the reduced numbers of `pack_outcome`."""
    lowest, highest = reduced[0], -reduced[1]
    if highest == RankOutcome.UNKNOWN:  # each may have changed something else
        return JointOutcome("stop", "no rank knows what it has changed")
    if lowest == highest or (lowest == outcome == RankOutcome.DONE):
        return JointOutcome("same")
    detail = f"rank {-reduced[3] - 1} could not carry it out"
    if lowest == RankOutcome.UNKNOWN or not reduced[2]:
        return JointOutcome("stop", detail)
    return JointOutcome("undo" if outcome == RankOutcome.DONE else "same", detail)
