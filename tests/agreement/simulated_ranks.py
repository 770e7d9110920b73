"""Ranks in threads of which one runs at a time, in an order drawn by chance; any of them can be killed at any line.

Everything but the wire and the action is the real thing: boundary, rounds, `AllRanks`. A rank that is killed raises
`Killed` out of the line it was at, and its wire is dead from that moment on. What it had sent may have reached some
of the others and not the rest. When nothing can go on any more, one rank's wait runs out of time.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.joint import Answer, Ask
from fp8watch.actions.undo import Undo
from fp8watch.errors import ActionError, CheckpointError, PartlyChanged
from fp8watch.records import ACTIONS, Command, CommandResult
from fp8watch.training.agreement import AllRanks
from fp8watch.training.agreement.base import MustStop
from fp8watch.training.agreement.transport import TransportLost
from fp8watch.training.boundary import Boundary

START = "this start"
AGREED = 9
"""In `Plan.lost`: after all ranks have agreed on a target."""
UNDOING = 10
"""In `Plan.lost`: while an action is taken back that has failed on another rank."""
TRACED = ("training/agreement/", "training/boundary.py", "simulated_ranks.py")


class Killed(BaseException):
    """kill -9."""


@dataclass(kw_only=True)
class Plan:
    """What happens in one simulated run."""

    ranks: int = 3
    steps: int = 10
    seed: int = 0
    commands: list[Command] = field(default_factory=list)
    arrivals: dict[tuple[int, int], int] = field(default_factory=dict)
    """(rank, index of a command) -> step after which it arrives; absent: at the command's own step, 1."""
    vetoes: set[tuple[int, int]] = field(default_factory=set)
    """(rank, index): refused there."""
    failures: dict[tuple[int, int], type[BaseException]] = field(default_factory=dict)
    """(rank, index): raised by apply there."""
    kills: dict[int, int] = field(default_factory=dict)
    """rank -> how many traced lines it lives."""
    damaged: set[tuple[int, int]] = field(default_factory=set)
    """(rank, target): a target of a rollback that is damaged there."""
    lost: dict[tuple[int, int], type[BaseException]] = field(default_factory=dict)
    """(rank, n): raised while a rollback chooses its target there, in place of its question n (0 is "begin"), or once
    it is `AGREED`; or, for any action, while `UNDOING`."""
    unsure: dict[tuple[int, int], type[Exception]] = field(default_factory=dict)
    """(rank, index): raised there while it is checked whether the command may be carried out."""
    lasts: dict[int, int] = field(default_factory=dict)
    """rank -> its last step, when it ends before the others."""
    bad: set[tuple[int, int]] = field(default_factory=set)
    """(rank, step): gradients are not finite there."""
    asks: bool = False
    """Whether the update, and the norm of this rank's stage, are put to the others before each step."""
    last_step: int = 1000


class Memory:
    """A journal in memory."""

    def __init__(self) -> None:
        self.term = self.sequence = 0
        self.unavailable: str | None = None
        self.begun: set[tuple[str, str]] = set()

    def knows(self, command: Command) -> bool:
        return (command.id, command.verb) in self.begun

    def begin(self, command: Command, step: int) -> None:
        self.begun.add((command.id, command.verb))
        self.term, self.sequence = max((self.term, self.sequence), (command.term, command.sequence))

    def finish(self, command: Command, status: str) -> None:
        pass


class Knobs:
    """Every action sets one entry of the rank's state."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.chosen: int | None = None
        self.ask: Ask = lambda answer, about: answer

    def unavailable(self) -> str | None:
        return None

    def choose(self, step: int, params: dict[str, Any], ask: Ask) -> None:
        """Targets 2, 1, 0 in turn, of which the plan says which are damaged where."""
        self.chosen, self.ask = None, ask
        self._lose(0)
        if ask(Answer.YES, "begin") is not Answer.YES:
            raise ActionError("another rank cannot")
        for target in (2, 1, 0):
            self._lose(3 - target)
            is_damaged = (self._rank.number, target) in self._rank.plan.damaged
            joint = ask(Answer.DAMAGED if is_damaged else Answer.YES, str(target))
            if joint is Answer.YES:
                self._lose(AGREED)
                self.chosen = target
                return
            if joint is Answer.CANNOT:
                break
        else:
            self._lose(4)
            ask(Answer.CANNOT, "none")
        raise CheckpointError("none is sound")

    def _lose(self, question: int) -> None:
        error = self._rank.plan.lost.get((self._rank.number, question))
        if error is not None:
            raise error("cannot be told here")

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        if not params.get("goes_back"):
            return self._set(step, params)
        try:
            applied = self._set(step, {**params, "value": f"back to {self.chosen}", "for_good": True})
        except Exception:
            self.ask(Answer.CANNOT, "changes")  # as `fp8watch.actions.rollback` does
            raise
        self.ask(Answer.YES, "changes")
        return applied

    def _set(self, step: int, params: dict[str, Any]) -> Applied:
        error = self._rank.plan.failures.get((self._rank.number, params["index"]))
        if error is PartlyChanged:
            self._rank.state[params["name"]] = f"half of it, on rank {self._rank.number}"
        if error is not None:
            raise error("cannot be done here")
        before, undo = self._rank.state.get(params["name"]), Undo()
        self._rank.state[params["name"]] = params["value"]
        if params.get("undoes"):
            undo.add(params["name"], lambda: self._take_back(params["name"], before))
        return Applied(
            step=step, params=params, before={"value": before}, expected={"value": params["value"]},
            undo=undo if params.get("undoes") else None,
        )  # fmt: skip

    def _take_back(self, name: str, before: Any) -> None:
        self._lose(UNDOING)
        self._rank.state[name] = before

    def read_back(self, applied: Applied) -> ReadBack:
        return ReadBack(ok=True)

    def revert(self, applied: Applied) -> None:
        if applied.params.get("undoes"):  # as a hold that is released over some steps
            self._rank.state[applied.params["name"]] = "on its way back"
            return
        if applied.params.get("for_good"):
            raise ActionError("cannot be taken back")
        self._rank.state[applied.params["name"]] = applied.before["value"]

    def read_back_revert(self, applied: Applied) -> ReadBack:
        return ReadBack(ok=True)


class Wire:
    """One group: operations matched by the order in which each rank starts them."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.given: list[dict[int, list[int]]] = []
        self.closed: set[int] = set()


class SimTransport:
    def __init__(self, wire: Wire, rank: Rank) -> None:
        self._wire, self._rank, self._count = wire, rank, 0

    def start(self, values: Sequence[int]) -> SimPending:
        index, self._count = self._count, self._count + 1
        given = self._wire.given
        while len(given) <= index:
            given.append({})
        is_open = self._rank.number not in self._wire.closed and not self._rank.is_dead
        if is_open:
            given[index][self._rank.number] = list(values)
        return SimPending(self._wire, self._rank, index, is_open)

    def close(self) -> None:
        if not self._rank.is_dead:
            self._wire.closed.add(self._rank.number)


class SimPending:
    def __init__(self, wire: Wire, rank: Rank, index: int, is_open: bool) -> None:
        self._wire, self._rank, self._index, self._is_open = wire, rank, index, is_open

    def wait(self, seconds: float) -> list[int]:
        if not self._is_open:
            raise TransportLost("closed")
        sim, rank = self._wire.sim, self._rank
        rank.num_waits += 1
        while True:
            given = self._wire.given[self._index]
            dead = {other.number for other in sim.ranks if other.is_dead}
            missing = set(range(sim.plan.ranks)) - set(given)
            if not missing:
                sizes = {len(values) for values in given.values()}
                assert len(sizes) == 1, f"operations of different kinds met: {given}"
                if dead & set(given) and sim.random.random() < 0.5:
                    raise TransportLost("a rank is gone")  # what it sent has reached others, not us
                return [min(column) for column in zip(*given.values(), strict=True)]
            if missing & (dead | self._wire.closed):
                raise TransportLost("a rank is gone")
            rank.pause(is_blocked=True)
            if rank.is_out_of_time:
                rank.is_out_of_time = False
                raise TransportLost("a rank did not come in time")


class Rank:
    def __init__(self, sim: Simulation, number: int) -> None:
        self.sim, self.plan, self.number = sim, sim.plan, number
        self.state: dict[str, Any] = {"updates": 0, "knob": 0, "other": 0, "a": 0, "b": 0}
        self.finished: dict[int, dict[str, Any]] = {}
        self.results: list[CommandResult] = []
        self.received: list[str] = []
        self.stopped: str | None = None
        self.is_dead = self.is_over = self.is_blocked = self.is_out_of_time = False
        self.error: BaseException | None = None
        self.interrupted: BaseException | None = None
        self.lines = self.num_waits = 0
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, daemon=True)

    def pause(self, *, is_blocked: bool = False) -> None:
        self.is_blocked = is_blocked
        self.sim.turn.release()
        self.turn.acquire()
        self.is_blocked = False

    def _live(self) -> None:
        self.turn.acquire()
        sys.settrace(self._trace)
        try:
            self._train()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self.is_over = True
            self.sim.turn.release()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in TRACED):
            return None
        if event == "line" and not self.is_dead:
            self.lines += 1
            if self.lines == self.plan.kills.get(self.number):
                self.is_dead = True
                raise Killed
        return self._trace

    def _train(self) -> None:
        plan, sim = self.plan, self.sim
        agreement = sim.agree(
            self.number, SimTransport(sim.votes, self), SimTransport(sim.verdicts, self),
            wait_seconds=1.0, aside=self._aside, stages=2 if plan.asks else 1,
        )  # fmt: skip
        knobs = Knobs(self)
        boundary = Boundary(
            rank=self.number, actions=dict.fromkeys(ACTIONS, knobs),  # type: ignore[arg-type]
            capabilities=dict, journal=Memory(), agreement=agreement, disarm=Vetoes(self),  # type: ignore[arg-type]
            mode="auto", send=self.results.append, attempt=lambda: 0, start=START,
            on_broken=self._stop, on_stop=self._stop,
        )  # fmt: skip
        last = plan.lasts.get(self.number, plan.steps)
        for step in range(1, last + 1):
            self.pause()
            try:
                if plan.asks:  # of a pipeline of two stages, under a clip limit
                    stage = self.number % 2
                    self.state["norms"] = agreement.stage_norms(stage, float(stage + 1))
                is_skipped = plan.asks and agreement.any_bad((self.number, step) in plan.bad, may_act=True)
            except MustStop as error:
                self._stop(str(error))
                boundary.leave(step)
                return
            self.state["updates"] += not is_skipped
            self.finished[step] = dict(self.state)
            for index, command in enumerate(plan.commands):
                if plan.arrivals.get((self.number, index), 1) == step:
                    self.asking = index
                    self.received.append(command.id)
                    boundary.receive(command)
            try:
                boundary.run(step)
            except (KeyboardInterrupt, SystemExit) as error:
                self.interrupted = error
            if self.stopped is not None or self.interrupted is not None:
                last = step  # the watch detaches before the process ends
                break
        agreement.leave(last)
        boundary.leave(last)
        agreement.close()

    def _aside(self, work: Callable[[], None]) -> Callable[[float], None]:
        work()  # it does nothing else any more
        return lambda seconds: None

    def _stop(self, reason: str) -> None:
        self.stopped = reason


class Vetoes:
    """Stands in for the disarm file: refuses what the plan says, at the last moment before a vote."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def reason(self, *, now: bool = False) -> str | None:
        error = self._rank.plan.unsure.get((self._rank.number, getattr(self._rank, "asking", -1)))
        if error is not None:
            raise error("the file cannot be read")
        vetoed = {index for number, index in self._rank.plan.vetoes if number == self._rank.number}
        return "refused here" if getattr(self._rank, "asking", None) in vetoed else None


class Simulation:
    """`run` plays a plan to its end; `ranks` tell what became of each."""

    def __init__(self, plan: Plan, agree: type[AllRanks] = AllRanks) -> None:
        self.plan, self.agree = plan, agree
        self.random = random.Random(plan.seed)
        self.turn = threading.Semaphore(0)
        self.votes, self.verdicts = Wire(self), Wire(self)
        self.num_timeouts = 0
        self.ranks = [Rank(self, number) for number in range(plan.ranks)]

    def run(self) -> Simulation:
        for rank in self.ranks:
            rank.thread.start()
        idle = 0
        while alive := [rank for rank in self.ranks if not rank.is_over]:
            rank = self.random.choice(alive)
            if rank.is_blocked and idle > 20 * len(alive) and all(other.is_blocked for other in alive):
                rank.is_out_of_time, idle = True, 0
                self.num_timeouts += 1
            before = rank.is_blocked, rank.num_waits
            rank.turn.release()
            self.turn.acquire()
            is_idle = rank.is_blocked and before == (True, rank.num_waits)  # not from one wait to the next
            idle = idle + 1 if is_idle else 0
        for rank in self.ranks:
            rank.thread.join()
            if rank.error is not None:
                raise rank.error
        return self

    def unanswered(self) -> dict[int, set[str]]:
        """Commands that a rank has received and not answered, for ranks that were not killed."""
        found = {r.number: set(r.received) - {result.id for result in r.results} for r in self.ranks if not r.is_dead}
        return {number: ids for number, ids in found.items() if ids}

    def disagreements(self) -> list[tuple[int, dict[int, dict[str, Any]]]]:
        """Steps that ranks finished in different states."""
        found = []
        for step in range(1, self.plan.steps + 1):
            states = {rank.number: rank.finished[step] for rank in self.ranks if step in rank.finished}
            if any(state != next(iter(states.values())) for state in states.values()):
                found.append((step, states))
        return found


def back(index: int, **fields: Any) -> Command:
    """The `index`-th command of a plan, a rollback."""
    return knob(index, action="rollback", params={"goes_back": True}, **fields)


def knob(index: int, name: str = "knob", **fields: Any) -> Command:
    """The `index`-th command of a plan."""
    params = {"index": index, "name": name, "value": index + 1, **fields.pop("params", {})}
    values: dict[str, Any] = {
        "id": f"a{index}", "run": "r", "attempt": 0, "term": 1, "sequence": index + 1, "verb": "apply",
        "action": "hold_lr", "params": params, "last_step": 1000, "start": START,
    }  # fmt: skip
    return Command(**{**values, **fields})
