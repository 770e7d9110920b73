"""One controller, several ranks: commands go to all of them, and are done only when all have done them."""

from __future__ import annotations

from typing import Any

from controller_sim import ScriptedPipeline

from fp8watch.controller.service import RunController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.records import ACTIONS, ActionRecord, Arrival, Command, CommandResult, Goodbye, Hello, Reply, StepFrame

POLICY = """
version: 1
mode: auto
rules:
  - name: loss
    when: {detector: loss_spike, severity: act}
    ladder: [{action: rewarm, settle_steps: 10}]
"""


class Job:
    """Ranks that answer when they are told to."""

    def __init__(self, ranks: int, *, terms: dict[int, int] | None = None) -> None:
        self.ranks, self.terms = ranks, terms or {}
        self.store = MemoryStore()
        pipeline = ScriptedPipeline(lambda sample: [("loss_spike", "unknown", ())] if sample.step >= 5 else [], None)
        self.now = 1.0
        self.controller = RunController(self.store, clock=lambda: self.now, make_pipeline=lambda run: pipeline)
        self.commands: list[Command] = []
        self.step = 0

    def hello(self, rank: int, **fields: Any) -> None:
        values: dict[str, Any] = {
            "wire_version": 1, "run": "r", "attempt": 0, "rank": rank, "local_rank": rank, "world_size": self.ranks,
            "pid": 100 + rank, "host": "h", "time_unix": 1.0, "step": 0, "policy": POLICY, "policy_name": "test",
            "capabilities": dict.fromkeys(ACTIONS, ""), "journal_term": self.terms.get(rank, 0),
        }  # fmt: skip
        self.take(self.controller.receive(Hello(**{**values, **fields})))

    def take(self, replies: list[Reply]) -> None:
        self.commands += [reply for reply in replies if isinstance(reply, Command)]

    def steps(self, count: int, ranks: list[int] | None = None) -> None:
        for _ in range(count):
            self.step += 1
            for rank in ranks or range(self.ranks):
                frame = StepFrame(
                    run="r", attempt=0, rank=rank, step=self.step, layout_id=0, time_unix=1.0,
                    scalars={"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3},
                )  # fmt: skip
                self.take(self.controller.receive(frame))

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.take(self.controller.tick())
            self.now += 1.0
        self.take(self.controller.tick())

    def answer(self, rank: int, **fields: Any) -> None:
        command = self.commands[-1]
        values: dict[str, Any] = {
            "id": command.id, "run": "r", "attempt": 0, "rank": rank, "verb": command.verb, "step": self.step,
            "status": "applied", "readback": "ok",
        }  # fmt: skip
        self.take(self.controller.receive(CommandResult(**{**values, **fields})))

    @property
    def action(self) -> ActionRecord:
        return {record.id: record for record in self.store.read("r", ActionRecord)}[self.commands[0].id]


def job(ranks: int = 2, **options: Any) -> Job:
    found = Job(ranks, **options)
    for rank in range(ranks):
        found.hello(rank)
    return found


def test_applied_only_when_all_ranks_say_so_and_read_back_likewise():
    run = job()
    run.steps(6)
    assert run.action.status == "sent"
    run.answer(0, readback="pending")
    assert run.action.status == "sent"
    run.answer(1, readback="pending")
    assert run.action.status == "applied"
    run.answer(0)
    assert run.action.readback == "pending"
    run.answer(1)
    assert (run.action.status, run.action.readback) == ("applied", "ok")


def test_one_rank_where_it_is_not_in_force_is_a_failure_that_shows_that_rank():
    run = job()
    run.steps(6)
    run.answer(0, observed={"learning_rate": 0.1})
    run.answer(1, readback="failed", observed={"learning_rate": 0.2}, detail="not what was asked for")
    assert (run.action.status, run.action.readback) == ("failed", "failed")
    assert run.action.observed == {"learning_rate": 0.2}
    assert "not what was asked for" in run.action.reason


def test_a_rank_that_never_answers_does_not_hold_the_controller_up():
    run = job()
    run.steps(6)
    run.answer(0)
    run.steps(90)
    assert (run.action.status, run.action.readback) == ("failed", "failed")


def test_a_rank_that_goes_is_not_waited_for():
    run = job(3)
    run.steps(6)
    run.answer(0)
    run.answer(1)
    run.controller.receive(Goodbye(run="r", rank=2, step=6))
    assert (run.action.status, run.action.readback) == ("applied", "ok")


def test_nothing_is_commanded_while_a_rank_is_missing():
    run = Job(2)
    run.hello(0)
    run.steps(12, ranks=[0])
    assert not list(run.store.read("r", ActionRecord)), "the other may still be on its way"
    run.wait(6)
    (noted,) = [item for item in run.store.read("r", Arrival) if item.kind == "late"]
    assert noted.key == "", "one that never spoke has no number that matters"
    run.steps(1, ranks=[0])
    assert run.commands == []
    assert "1 of 2 ranks are connected" in list(run.store.read("r", ActionRecord))[-1].reason


def test_a_rank_that_falls_silent_is_gone_on_without_and_taken_in_again():
    run = job()
    run.steps(3)
    run.steps(12, ranks=[0])
    assert run.controller.state("r").last_step < 5
    run.wait(6)
    assert run.commands, "what the others show is acted on"
    (noted,) = [item for item in run.store.read("r", Arrival) if item.kind == "late"]
    assert noted.key == "1", "a replay has to know of it"
    run.step = 3
    run.steps(12, ranks=[1])
    assert run.controller.unseen.counts["r"] == {"late": 12}, "and what came too late is counted"
    run.steps(1)
    assert not run.controller.unseen.counts["r"]["missing"]


def test_the_term_is_above_what_any_rank_has_begun():
    run = job(3, terms={0: 0, 1: 4, 2: 1})
    run.steps(6)
    assert (run.commands[0].term, run.commands[0].sequence) == (5, 1)


def test_a_new_start_is_told_from_a_rank_that_comes_back_whichever_rank_is_first():
    run = job()
    run.steps(6)
    for rank in range(2):
        run.controller.lost("r", rank)
    run.hello(1, attempt=1, pid=301, journal_term=1)
    run.hello(0, attempt=1, pid=300, journal_term=1)
    assert run.controller.state("r").hello.pid == 300
    assert run.action.status == "expired"
