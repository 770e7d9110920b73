"""A run belongs to the nodes and the user that hold it: what another says under its name is refused, until they are
gone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cluster_parts as parts
import hand_made as make
import msgspec
import pytest
from cluster_parts import POLICY, FakeRank, settle, wait_for
from fake_agents import Agents, rounds
from test_doctor_cluster import doctor

from fp8watch.controller.cluster import contest
from fp8watch.controller.cluster.holders import refusal
from fp8watch.controller.cluster.inflow import Entered
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import LEASE, RunKeys
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import (
    ACTIONS,
    CheckpointRecord,
    Command,
    CommandResult,
    Evaluation,
    Finding,
    Hello,
    LedgerUpdate,
    NodeFrame,
    RankLost,
    Uplink,
    Welcome,
)
from fp8watch.security import KeyRing, Signer, Verifier

PID = 77


class Elsewhere(FakeRank):
    """A process on another host, which says that it is another user's: the agent knows better."""

    def hello(self) -> Hello:
        return msgspec.structs.replace(super().hello(), pid=PID, host="elsewhere", owner=424_242)


def hello(rank: int = 0, world_size: int = 2, **more: Any) -> Hello:
    return make.hello("r", rank=rank, world_size=world_size, **({"owner": 1000} | more))


def frame(node: str, step: int, *ranks: int, loss: float = 2.0) -> NodeFrame:
    return NodeFrame(
        run="r", attempt=0, node=node, rank=ranks[0], step=step, layout_id=1, time_unix=float(step), ranks=list(ranks),
        scalars=[{"loss": loss, "grad_norm": 1.0} for _ in ranks],
    )  # fmt: skip


HELD = {0: hello(0), 1: hello(1)}
NODES = {0: "a", 1: "b"}


@pytest.mark.parametrize(
    ("message", "node", "expected"),
    [
        (hello(0), "a", ""),
        (hello(0, pid=7), "a", ""),  # restarted where it was
        (hello(0), "c", "other_node"),
        (hello(0, owner=2000), "c", "other_owner"),
        (hello(0, owner=0), "a", "other_owner"),
        (hello(2, 3, owner=2000), "c", "other_owner"),
        (hello(2, 3), "c", "other_node"),  # of another job: a run of two ranks has no third
        (hello(2, 3), "a", ""),  # restarted with more ranks, on a node of this run
        (hello(1), "a", "other_node"),
        (hello(0, owner=None), "a", ""),  # an agent of an earlier version
        (frame("a", 1, 0), "a", ""),
        (frame("b", 1, 0), "b", "other_node"),
        (frame("b", 1, 1), "c", "other_node"),  # in another's name
        (frame("a", 1, 0, 1), "a", "other_node"),
        (frame("c", 1, 5), "c", "other_node"),
        (frame("a", 1, 5), "a", ""),  # of the run's node, whose hello for it is still to come
        (frame("a", 1, 0, 5), "a", ""),
        (RankLost(run="r", rank=1, node="b"), "b", ""),
        (RankLost(run="r", rank=1, node="a"), "a", "other_node"),
        (make.goodbye("r", rank=0), "b", "other_node"),
        (make.layout("r", rank=1), "a", "other_node"),
        (make.layout("r", rank=1), "b", ""),
        (CommandResult(id="x", run="r", attempt=0, rank=0, verb="apply", step=1, status="applied"), "c", "other_node"),
        (CheckpointRecord(run="r", attempt=0, checkpoint="c", step=1, path="/c", label="pending"), "c", "other_node"),
        (Evaluation(run="r", attempt=0, step=1, scores={}), "b", ""),
    ],
)
def test_only_those_that_hold_a_run_speak_for_it(message: Uplink, node: str, expected: str) -> None:
    assert refusal(message, node, HELD, NODES) == expected


def test_a_rank_that_is_gone_may_come_back_anywhere() -> None:
    assert refusal(hello(0), "c", {1: HELD[1]}, NODES) == ""
    assert refusal(hello(0, owner=2000), "c", {}, NODES) == ""
    assert refusal(hello(0, owner=2000), "c", {1: HELD[1]}, NODES) == "other_owner"


def test_a_start_tells_two_jobs_of_one_size_apart() -> None:
    held = {0: hello(0, start="one")}
    assert refusal(hello(1, start="one"), "b", held, {0: "a"}) == ""
    assert refusal(hello(1, start="two"), "b", held, {0: "a"}) == "other_node"
    assert refusal(hello(1, start="two"), "a", held, {0: "a"}) == "", "its own node says that it was restarted"


def test_what_another_users_run_held_is_forgotten_with_it() -> None:
    controller = ClusterController(MemoryStore(), clock=float)
    controller.take(hello(0), node="a")
    controller.take(hello(1), node="b")
    for rank, node in NODES.items():
        controller.take(RankLost(run="r", rank=rank, node=node))
    controller.take(hello(0, owner=2000, pid=9), node="c")
    assert controller.refusal(frame("b", 1, 1), "b") == "other_node"
    assert controller.refusal(frame("c", 1, 0), "c") == ""


def test_commands_and_labels_name_the_nodes_they_are_for() -> None:
    controller = ClusterController(MemoryStore(), clock=float)
    for rank, node in NODES.items():
        controller.take(hello(rank, policy=POLICY, capabilities=dict.fromkeys(ACTIONS, "")), node=node)
    replies = [
        reply
        for step in range(1, 9)
        for rank, node in NODES.items()
        for reply in controller.take(frame(node, step, rank, loss=float("nan") if step > 4 else 2.0), node=node)
    ]
    commands = [reply for reply in replies if isinstance(reply, Command)]
    assert commands
    assert {tuple(command.nodes) for command in commands} == {("a", "b")}


@pytest.mark.redis
def test_a_refused_node_is_noted_while_it_lasts_and_admitted_when_the_holder_is_gone(store: RedisStore) -> None:
    program = ClusterProgram(store.link, holder="c", lease_seconds=1000.0)
    program._round()
    program._join("r")
    key = RunKeys("r").contested("b")
    program._take([Entered("r", "1-0", hello(0, 1), "a"), Entered("r", "2-0", make.layout("r"), "a")])
    program._take([Entered("r", "3-0", hello(0, 1, owner=2000), "b"), Entered("r", "4-0", frame("b", 1, 0), "b")])
    noted = contest.decode(store.link.client.get(key))
    assert noted == contest.Contest(holder="a", owner=1000, refused_owner=2000)
    assert "node a (user 1000 there, user 2000 here)" in contest.words("r", "b", noted)
    assert 0 < store.link.client.pttl(key) <= contest.NOTE_MS
    assert dict(program.inflow.refused) == {("r", "other_owner"): 1, ("r", "other_node"): 1}
    program._take([Entered("r", "5-0", make.goodbye("r"), "a"), Entered("r", "6-0", hello(0, 1, owner=2000), "b")])
    assert store.link.client.get(key) is None
    assert program.runs.nodes["r"] == {0: "b"}
    pilot = program.runs.pilot("r")
    assert pilot is not None
    assert pilot.ranks[0].owner == 2000


@pytest.mark.redis
def test_a_successor_knows_who_holds_a_run_with_and_without_a_memory(store: RedisStore) -> None:
    agents = Agents(store)
    agents.hello()
    first = ClusterProgram(store.link, holder="c", lease_seconds=1000.0)
    rounds(first, 3)
    agents.train(1, 3)
    rounds(first, 2)
    first._commit("r")
    first.lease.release()
    second = ClusterProgram(store.link, holder="d", lease_seconds=1000.0)
    rounds(second, 2)
    assert second.runs.nodes["r"] == {0: "a", 1: "b"}
    for field in ("nodes", "memory"):  # written by an earlier version; not usable at all
        second.lease.release()
        store.link.client.hdel(RunKeys("r").state, field)
        second = ClusterProgram(store.link, holder=field, lease_seconds=1000.0)
        rounds(second, 2)
        assert second.runs.nodes["r"] == {0: "a", 1: "b"}
        agents.train(4, 6)
        rounds(second, 2)
        assert not second.inflow.refused


@pytest.mark.redis
def test_two_runs_of_one_name_on_two_nodes(tmp_path: Path) -> None:
    """The second is not watched and hears nothing of the first's commands; both nodes are named, and it is told."""
    with parts.cluster(tmp_path) as made:
        made.agent("n0")
        made.agent("n1")
        controller = made.controller("a")
        job = parts.Job(made, "r", {"n0": 1})
        store = settle(made, job)
        other = Elsewhere(made.socket("n1"), "r", 0, 1)
        said: list[str] = []
        take = other._take

        def hear(reply: Any) -> None:
            said.extend(reply.warnings if isinstance(reply, Welcome) else [])
            take(reply)

        other._take = hear  # type: ignore[method-assign]

        def train(steps: int, *, nan_every: int = 0) -> None:
            for _ in range(steps):
                job.train(1, nan_every=nan_every)
                other.hear()
                other.train(0)

        def both(condition: Any, what: str) -> Any:
            def once() -> Any:
                train(1)
                return condition()

            return wait_for(once, 30, what)

        both(lambda: any("node n0" in text and "FP8WATCH_RUN" in text for text in said), "the second being told")
        problem = both(lambda: doctor(made.redis.url)[1].get("run r"), "the doctor")
        assert problem[0] == "problem"
        assert "node n0" in problem[1]
        assert "node n1" in problem[1]
        before = len(job.ranks[0].applied)
        train(1, nan_every=1)
        both(lambda: len(job.ranks[0].applied) > before, "the holder's command")
        train(20)
        assert list(store.read("r", Finding)), "what the holder has is found"
        assert other.applied == []
        assert other.ledger == []
        both(lambda: store.runs()[0].last_step > job.step - 20, "the holder's steps being recorded")
        assert "Traceback" not in controller.text()
        job.end()  # now the name is the other's

        def is_taken_over() -> bool:
            other.hear()
            other.train(0)
            time.sleep(0.02)
            (record,) = store.runs()
            return record.state == "running" and record.hello.pid == PID and record.last_step >= other.step - 5

        assert store.link.client.get(LEASE)
        wait_for(is_taken_over, 40, "the second being watched")
        assert store.runs()[0].hello.owner == os.getuid()
        assert "run r" not in doctor(made.redis.url)[1]
        store.close()
        other.close()


@pytest.mark.redis
@pytest.mark.parametrize("what", ["rank", "node"])
def test_a_rank_moves_when_it_or_its_node_has_died(tmp_path: Path, what: str) -> None:
    """An elastic restart: another node says hello for the rank at once, and is admitted when the first is gone."""
    with parts.cluster(tmp_path) as made:
        first = made.agent("n0")
        made.agent("n1")
        made.controller("a")
        job = parts.Job(made, "r", {"n0": 1})
        store = settle(made, job)
        if what == "node":
            first.kill()
        job.ranks[0].close()  # killed; if its node lives, it says so after its grace time
        moved = Elsewhere(made.socket("n1"), "r", 0, 1)

        def is_watched() -> bool:
            moved.hear()
            moved.train(0)
            time.sleep(0.05)
            record = store.runs()[0]
            return record.hello.pid == PID and record.state == "running" and record.last_step >= moved.step - 5

        wait_for(is_watched, 60, "the moved rank being watched")
        store.close()
        moved.close()


def test_what_is_signed_names_the_nodes() -> None:
    ring = KeyRing("command", (b"k" * 32,))
    command = Command(
        id="a", run="r", attempt=0, term=1, sequence=1, verb="apply", action="halt", last_step=9, nodes=["n0"]
    )
    label = LedgerUpdate(run="r", checkpoint="c", label="good", nodes=["n0"])
    signer, verifier = Signer(ring), Verifier(ring)
    assert verifier.command(signer.command(command))
    assert not verifier.command(msgspec.structs.replace(signer.command(command), nodes=[]))
    assert not verifier.ledger(msgspec.structs.replace(signer.ledger(label), nodes=["n1"]))
