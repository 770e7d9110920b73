"""The protocol by which all ranks carry out a command at one boundary, or none does. Pure: no clock, no wire, no torch.

Every rank casts one ballot at each boundary: the number of the command it would begin, and whether it refuses it.
The ballots are reduced element by element to their minimum; the result is known at the next boundary, and is the same
on every rank that learns it. A command is carried out when every rank named it, with the same content, and none
refused. A ballot that was cast binds: a rank that has voted for a command carries it out at the next boundary,
whatever it has learnt since.

Why ranks must name the same number, and not only "all up to": a controller that was restarted numbers anew under a
higher term, so a rank that missed a command cannot know that it did.

A rank names the lowest number that waits with it. Where all ranks name one and they differ, the rank that named the
highest holds nothing below it, so that nothing below it can be agreed on: in the next round all name their lowest from
there on. A command that never comes to one rank is so overtaken by the next one that all ranks hold, and does not keep
that one waiting until it expires.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fp8watch.records import Command
from fp8watch.training.agreement.base import Candidate, Fate, Joint, Ruling

_DIGEST_BITS = 62
"""Digests are compared as signed 64-bit numbers, negated too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank says in one round."""

    rank: int
    step: int
    """Updates done at the boundary at which it is cast: ranks that count differently agree on nothing."""
    key: int = 0
    """`number` of the command it would begin; 0: none."""
    digest: int = 0
    is_refused: bool = False
    is_leaving: bool = False

    def pack(self) -> list[int]:
        """Eight 64-bit numbers to be reduced to their minimum over ranks."""
        return [
            self.key, -self.key, self.digest, -self.digest, self.step, -self.step,
            -(self.rank + 1) if self.is_refused else 0, -(self.rank + 1) if self.is_leaving else 0,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The minimum over all ranks' ballots, read back."""

    key: int
    """The number that every rank named; 0: they named different ones, or none."""
    gap: int
    """The highest number that a rank named, where every rank named one and they differ: below it there is nothing that
    all of them hold. 0 else."""
    is_same_content: bool
    is_same_step: bool
    refused_by: int | None
    """Highest rank that refuses what it named."""
    left: int | None
    """Highest rank that leaves."""

    @classmethod
    def read(cls, reduced: Sequence[int]) -> Tally:
        """From the reduced numbers of `Ballot.pack`."""
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
    """Term and sequence as one number, in the order in which commands are given."""
    return (command.term << 32) | command.sequence


def digest(command: Command) -> int:
    """Of all that a command says; never 0."""
    content = msgspec.json.encode(command, order="deterministic")
    found = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return found >> (64 - _DIGEST_BITS) | 1


class Rounds:
    """One rank's side of the rounds. `vote` and `count` alternate, until `over` says why there are no more."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._named: Candidate | None = None
        self._floor = 0
        self._start = 0
        self._ruled: set[int] = set()
        self.over: str | None = None
        """Why nothing is voted on any more; None: it is."""
        self.is_open = False
        """Whether a ballot was cast whose round was not counted yet."""
        self.left: int | None = None
        """The rank whose leaving ended the rounds."""

    def vote(self, candidates: Sequence[Candidate], step: int) -> tuple[Ballot, list[Ruling]]:
        """The ballot of the boundary after `step` updates, and what needs no vote.

        Needs no vote: what has expired (every rank counts the same steps), what was ruled on before and is only
        repeated, what was overtaken, and commands of a term that a newer one has ended.
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
        """The end of a round: what it has ruled on the command named, None when that goes on waiting."""
        tally, named = Tally.read(reduced), self._named
        self._named, self.is_open = None, False
        # Back to the lowest after each round without a gap: what was missing may have come meanwhile.
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
        """A round's result will never be known here: no more rounds. The command that others may begin now, if any.

        Only a command that this rank has voted for can be begun by others.
        """
        named = self._named
        self._named, self.is_open = None, False
        self.over = self.over or reason
        return named.command if named is not None and named.refusal is None else None

    def leave(self, step: int) -> Ballot:
        """The last ballot of a rank that makes no further step; it belongs to the boundary after `step` updates."""
        self.over = self.over or "this rank has left the run"
        return Ballot(rank=self._rank, step=step, is_leaving=True)


def pack_fate(rank: int, fate: Fate, *, can_undo: bool) -> list[int]:
    """Four numbers to be reduced to their minimum over ranks."""
    return [fate, -fate, 1 if can_undo or fate != Fate.DONE else 0, -(rank + 1) if fate != Fate.DONE else 0]


def pack_answer(answer: int, about: str) -> list[int]:
    """Four numbers to be reduced to their minimum over ranks."""
    topic = int.from_bytes(hashlib.blake2b(about.encode(), digest_size=8).digest(), "big") >> (64 - _DIGEST_BITS) | 1
    return [answer, topic, -topic, 0]


def read_answer(reduced: Sequence[int]) -> int:
    """The lowest answer, from the reduced numbers of `pack_answer`; 0 when ranks spoke of different things."""
    return reduced[0] if reduced[1] == -reduced[2] else 0


NOBODY = 2**63 - 1
"""In a place of a verdict that another rank fills in: it changes no minimum."""


def pack_verdict(
    *,
    is_bad: bool = False,
    may_act: bool = True,
    left: int | None = None,
    norm: tuple[int, float] | None = None,
    stages: int = 1,
) -> list[int]:
    """What is said before an optimizer step, to be reduced to the minimum over ranks: three numbers, and in a pipeline
    one for each stage.

    `left`: this rank, which leaves. `norm`: (stage, norm of its gradients); a norm is not negative, so its bits are in
    the order of the numbers, with infinity and then NaN above all.
    """
    places = [NOBODY] * stages if stages > 1 else []
    if norm is not None and places:
        places[norm[0]] = struct.unpack("<q", struct.pack("<d", abs(norm[1])))[0]
    return [-int(is_bad), int(may_act), 0 if left is None else -(left + 1), *places]  # fmt: skip


def read_norms(reduced: Sequence[int]) -> list[float]:
    """The norm of each stage, from the reduced numbers of `pack_verdict`; NaN where no rank of a stage said one."""
    return [struct.unpack("<d", struct.pack("<q", bits))[0] for bits in reduced[3:]]


CANNOT = [0, 0, 0, 0]
"""What a rank answers to any question that takes no part any more."""

ABSTAINS = [int(Fate.DONE), -int(Fate.UNKNOWN), 1, 0]
"""What a rank says that leaves and carries nothing out any more: it changes no minimum."""


def compare(fate: Fate, reduced: Sequence[int]) -> Joint:
    """What a rank with this fate has to do, from the reduced numbers of `pack_fate`."""
    lowest, highest = reduced[0], -reduced[1]
    if lowest == highest or (lowest == fate == Fate.DONE):
        return Joint("same")
    detail = f"rank {-reduced[3] - 1} could not carry it out"
    if lowest == Fate.UNKNOWN or not reduced[2]:
        return Joint("stop", detail)
    return Joint("undo" if fate == Fate.DONE else "same", detail)
