"""Runs the rounds over a transport: a reduction is started at one boundary and waited for at the next.

Ranks wait instead of polling, because ranks that poll may see a result at different boundaries. When a result is lost,
this rank carries nothing out any more. If it had voted for a command, others may have begun it, so this rank stops.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from fp8watch.training.agreement.base import Candidate, JointOutcome, MustStop, RankOutcome, Ruling, asks_first
from fp8watch.training.agreement.rounds import (
    ABSTAINS,
    CANNOT,
    Ballot,
    Rounds,
    compare,
    pack_answer,
    pack_outcome,
    pack_verdict,
    read_answer,
    read_norms,
)
from fp8watch.training.agreement.transport import Pending, Transport, TransportLost

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
"""How long detach waits for the other ranks to learn that this one leaves. The last ballot is still sent after that,
as long as the process lives."""


def in_a_thread(work: Callable[[], None]) -> Callable[[float], None] | None:
    """Start `work` on a thread and return its `join`; None when no thread can be started at interpreter shutdown."""
    thread = threading.Thread(target=work, name="fp8watch-leave", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread.join


class AllRanks:
    """The agreement of several ranks. Used on the training thread only, except for the drain."""

    is_joint = True

    def __init__(
        self,
        rank: int,
        votes: Transport,
        verdicts: Transport,
        *,
        wait_seconds: float,
        drain_seconds: float = DRAIN_SECONDS,
        stages: int = 1,
        aside: Callable[[Callable[[], None]], Callable[[float], None] | None] = in_a_thread,
    ) -> None:
        """`votes` is for the boundaries, `verdicts` for the questions before an optimizer step.

        `wait_seconds`: a rank that takes longer is given up. `stages`: number of pipeline stages, equal on all ranks.
        """
        self.unavailable: str | None = None
        self.on_over: Callable[[str], None] = lambda reason: None
        """Called once with the reason when voting has ended."""
        self._rank, self._stages = rank, stages
        self._votes, self._verdicts = votes, verdicts
        self._wait_seconds = wait_seconds
        self._drain_seconds = drain_seconds
        self._rounds = Rounds(rank)
        self._pending: Pending | None = None
        self._aside = aside
        self._has_left = False
        self._join: Callable[[float], None] = lambda seconds: None
        self._is_asked = False
        self._is_verdict_over = False

    def settle(self, step: int) -> Ruling | None:
        """See `Agreement`."""
        if self._pending is None:
            return None
        try:
            reduced = self._pending.wait(self._wait_seconds)
        except TransportLost as error:
            self._lost(str(error))
            return None
        self._pending = None
        ruling = self._rounds.count(reduced)
        if self._rounds.over is not None:
            self._end(self._rounds.over)
        return ruling

    def confirm(self, outcome: RankOutcome, *, can_undo: bool) -> JointOutcome:
        """See `Agreement`."""
        if self._rounds.over is not None:
            return JointOutcome("same")
        try:
            reduced = self._votes.start(pack_outcome(self._rank, outcome, can_undo=can_undo)).wait(self._wait_seconds)
        except TransportLost as error:
            self._rounds.lose(str(error))
            self._end(str(error))
            return JointOutcome("stop", str(error))
        return compare(outcome, reduced)

    def lowest(self, answer: int, about: str) -> int:
        """See `Agreement`."""
        if self._rounds.over is not None:
            return 0
        try:
            return read_answer(self._votes.start(pack_answer(answer, about)).wait(self._wait_seconds))
        except TransportLost as error:
            self._rounds.lose(str(error))
            self._end(str(error))
            raise MustStop(
                f"it is unknown whether the other ranks go on with this action ({about}): {error}"
            ) from error

    def due(self, candidates: Sequence[Candidate], step: int) -> list[Ruling]:
        """See `Agreement`."""
        over = self._rounds.over
        if over is not None:
            return [Ruling(c.command, c.refusal or ("unavailable", over)) for c in candidates]
        ballot, rulings = self._rounds.vote(candidates, step)
        self._pending = self._votes.start(ballot.pack())
        return rulings

    def any_bad(self, is_bad: bool, *, may_act: bool) -> bool:
        """Wait for whether every rank skips this update: it is bad on one rank, and all ranks may act.

        Called before each optimizer step while updates may be skipped. Raises `MustStop` when the answer is lost.
        """
        reduced = self._ask(pack_verdict(is_bad=is_bad, may_act=may_act, stages=self._stages))
        return reduced is not None and bool(reduced[0]) and bool(reduced[1])

    def stage_norms(self, stage: int, norm: float) -> list[float] | None:
        """Wait for the gradient norm of every pipeline stage; `norm` is that of this one. None: voting has ended.

        Called before each optimizer step while a clip limit of ours is in force. Raises `MustStop` like `any_bad`.
        """
        reduced = self._ask(pack_verdict(norm=(stage, norm), stages=self._stages))
        return None if reduced is None else read_norms(reduced)

    def _ask(self, verdict: list[int]) -> list[int] | None:
        if self._rounds.over is not None or self._is_verdict_over:
            return None
        self._is_asked = True
        try:
            reduced = self._verdicts.start(verdict).wait(self._wait_seconds)
        except TransportLost as error:
            self._lost_verdict(str(error))
            return None
        if reduced[2]:
            # A rank leaves. The votes continue until the round that counts its leaving.
            self._is_verdict_over = True
            return None
        return reduced

    def abandon(self, reason: str) -> None:
        """See `Agreement`."""
        if not self._has_left and self.unavailable is None:
            self._rounds.lose(reason)
            self._end(reason)

    def leave(self, step: int) -> None:
        """See `Agreement`."""
        if self._rounds.over is not None:
            return
        self._has_left = True
        pending, self._pending = self._pending, None
        ballot = self._rounds.leave(step + 1)
        deadline = time.monotonic() + self._drain_seconds
        join = self._aside(lambda: self._drain(pending, ballot, deadline))
        if join is not None:
            self._join = join
            return
        self._wait_seconds = self._drain_seconds
        self._drain(pending, ballot, deadline)

    def _drain(self, pending: Pending | None, ballot: Ballot, deadline: float) -> None:
        """Take part in the reductions that the other ranks still wait for, as a rank that carries nothing out."""
        is_asked = self._is_asked and not self._is_verdict_over
        verdict = pack_verdict(left=self._rank, stages=self._stages)
        last = [self._verdicts.start(verdict)] if is_asked else []
        try:
            if pending is not None:
                ruling = self._rounds.count(pending.wait(self._wait_seconds))
                if self._rounds.left is not None:
                    return  # the other ranks have ended voting too
                if ruling is not None and ruling.refusal is None:
                    if asks_first(ruling.command):
                        self._votes.start(CANNOT).wait(self._wait_seconds)
                    self._votes.start(ABSTAINS).wait(self._wait_seconds)
            last.append(self._votes.start(ballot.pack()))
            for item in last:
                item.wait(max(0.0, min(self._wait_seconds, deadline - time.monotonic())))
        except TransportLost as error:
            logger.debug("leaving: %s", error)
        finally:
            self._release()

    def close(self) -> None:
        """See `Agreement`."""
        self.unavailable = self.unavailable or "this rank has left the run"
        self._join(self._drain_seconds)

    def _lost(self, reason: str) -> None:
        command = self._rounds.lose(reason)
        self._end(reason)
        if command is not None:
            raise MustStop(
                f"all ranks may have begun {command.action}, and this one got no result of the vote: {reason}", command
            )

    def _lost_verdict(self, reason: str) -> None:
        """Find out why a verdict is lost. If a rank has left in an orderly way, which the votes show, this rank goes on
        without agreement; else it stops."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                self._rounds.count(pending.wait(self._wait_seconds))
            except TransportLost as error:
                reason = str(error)
        if self._rounds.left is not None:
            self._end(self._rounds.over or reason)
            return
        self._rounds.lose(reason)
        self._end(reason)
        raise MustStop(f"it is unknown whether the other ranks skip this update: {reason}")

    def _end(self, reason: str) -> None:
        self.unavailable = f"the ranks can no longer agree on actions: {reason}"
        self._pending = None
        self._release()
        self.on_over(self.unavailable)

    def _release(self) -> None:
        self._votes.close()
        self._verdicts.close()
