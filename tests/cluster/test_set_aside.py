"""One run that cannot be processed is its own affair: the others go on, and it does not come back at a restart."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import cluster_parts as parts
import hand_made as make
import msgspec
import pytest
from cluster_parts import settle, wait_for
from fake_agents import Agents, rounds
from hand_made import RawClient

from fp8watch import wire
from fp8watch.controller.cluster.aside import FIRST_SECONDS, MAX_SECONDS, SetAsideRuns
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import ACTIVE, RunKeys
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import ACTIONS, Finding, RunRecord

pytestmark = pytest.mark.redis
HOSTILE: dict[str, dict[str, Any]] = {
    "term": {"journal_term": 2**64 - 1},
    "step": {"step": 2**63 - 1},
    "attempt": {"attempt": 2**63 - 1},
    "world": {"world_size": 2**40},
    "time": {"time_unix": math.nan},
    "name": {"run": "x" * 70_000},
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_run_is_set_aside_for_longer_each_time_and_begins_anew_when_it_was_well() -> None:
    clock = Clock()
    aside = SetAsideRuns(clock)
    assert aside.is_due("r")
    assert aside.set_aside("r") == FIRST_SECONDS
    assert not aside.is_due("r")
    assert aside.may_use_memory("r"), "what was read since is to blame first"
    clock.now += FIRST_SECONDS
    assert aside.is_due("r")
    assert aside.set_aside("r") == 2 * FIRST_SECONDS
    assert not aside.may_use_memory("r")
    assert [aside.set_aside("r") for _ in range(10)][-1] == MAX_SECONDS
    clock.now += 2 * MAX_SECONDS + 1
    assert aside.set_aside("r") == FIRST_SECONDS
    assert aside.may_use_memory("r")
    assert aside.times["r"] == 13


def beside(store: RedisStore, program: ClusterProgram) -> tuple[Agents, Any]:
    """Run `r`, whose work fails when it is told to, and run `sound` beside it, both being judged."""
    agents = Agents(store)
    agents.hello()
    sound = make.hello("sound")
    store.link.client.sadd(ACTIVE, "sound")
    store.link.client.set(RunKeys("sound").presence("a"), "1")

    def put(message: Any) -> None:
        entry = agents._sealers["a"].seal(wire.pack(message))
        store.link.client.xadd(RunKeys("sound").frames, {"k": "m", "e": msgspec.msgpack.encode(entry)})

    put(sound)
    agents.train(1, 3)
    rounds(program, 6)
    return agents, put


def states(store: RedisStore) -> dict[str, int]:
    return {record.run: record.last_step for record in store.runs()}


@pytest.mark.parametrize("where", ["commit", "tick", "look"])
def test_the_others_go_on_and_it_is_taken_up_again(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    program = ClusterProgram(store.link, holder="c", lease_seconds=1000.0, clock=clock)
    agents, _ = beside(store, program)
    assert set(states(store)) == {"r", "sound"}
    bad = True

    def failing(real: Any) -> Any:
        def work(*arguments: Any, **more: Any) -> Any:
            about = [getattr(getattr(item, "record", None), "run", item) for item in arguments]
            if bad and "r" in about:
                raise OverflowError("can't serialize ints >= 2**64")
            return real(*arguments, **more)

        return work

    owner, name = {
        "commit": (program.runs, "memory"), "tick": (program.runs, "_go_on_without_the_late"),
        "look": (program, "_look_for_nodes"),
    }[where]  # fmt: skip
    monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    agents.train(4, 6)
    for _ in range(4):
        clock.now += 2.0
        rounds(program, 2)
    assert program.aside.times["r"] >= 1
    assert "run r cannot be processed and is set aside" in caplog.text
    assert "sound" in program.runs.names()
    assert program.aside.times["sound"] == 0
    bad = False
    clock.now += MAX_SECONDS
    rounds(program, 2)
    agents.train(7, 9)
    clock.now += 3.0
    rounds(program, 4)
    pilot = program.runs.pilot("r")
    assert pilot is not None
    assert pilot.step == 9, "it goes on from its last memory"


def test_what_was_read_of_it_does_not_come_back_with_a_restart(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    program = ClusterProgram(store.link, holder="c", lease_seconds=1000.0, clock=clock)
    agents, _ = beside(store, program)
    clock.now += 2.0
    rounds(program, 2)
    poison = RunKeys("r")
    agents.frame("a", 4, math.nan)

    def work(run: str) -> bytes:
        raise OverflowError(run)

    monkeypatch.setattr(program.runs, "memory", work)
    clock.now += 2.0
    rounds(program, 2)
    assert program.aside.times["r"] == 1
    pending = store.link.client.xpending(poison.frames, "controller")["pending"]
    assert pending == 0
    program.lease.release()
    successor = ClusterProgram(store.link, holder="d", lease_seconds=1000.0, clock=clock)
    rounds(successor, 6)
    assert successor.aside.times["r"] == 0
    assert successor.runs.pilot("r") is not None
    assert successor.inflow.claimed["r"] == 0


def test_a_run_that_cannot_be_joined_loses_no_place(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    program = ClusterProgram(store.link, holder="c", lease_seconds=1000.0, clock=clock)
    agents, _ = beside(store, program)
    program._commit("r")
    program.lease.release()
    kept = {name: store.link.client.hget(RunKeys("r").state, name) for name in ("last_id", "numbers", "memory")}
    successor = ClusterProgram(store.link, holder="d", lease_seconds=1000.0, clock=clock)

    def failing(*_: Any) -> None:
        raise KeyError("r")

    with monkeypatch.context() as patched:
        patched.setattr(successor.inflow, "_make_group", failing)
        rounds(successor, 3)
    assert successor.aside.times["r"] == 1
    assert {name: store.link.client.hget(RunKeys("r").state, name) for name in kept} == kept
    clock.now += FIRST_SECONDS
    agents.train(4, 6)
    rounds(successor, 5)
    pilot = successor.runs.pilot("r")
    assert pilot is not None
    assert pilot.step == 6


def test_a_key_of_another_kind_stops_one_run_only(store: RedisStore) -> None:
    clock = Clock()
    program = ClusterProgram(store.link, holder="c", lease_seconds=1000.0, clock=clock)
    agents, _ = beside(store, program)
    store.link.client.delete(RunKeys("r").state)
    store.link.client.set(RunKeys("r").state, "no hash")
    agents.train(4, 5)
    clock.now += 2.0
    rounds(program, 4)
    assert program.aside.times["r"] >= 1
    assert "sound" in program.runs.names()
    assert not program._is_away


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_hello_ends_no_controller_and_stalls_no_other_run(tmp_path: Path, case: str) -> None:
    with parts.cluster(tmp_path) as made:
        agent, controller = made.agent("n0"), made.controller("a")
        job = parts.Job(made, "r", {"n0": 1})
        store = settle(made, job)
        more = {"run": "evil", "capabilities": dict.fromkeys(ACTIONS, "")} | HOSTILE[case]
        name = more.pop("run")
        client = RawClient(made.socket("n0"))
        client.send(make.hello(name, rank=0, **more), make.layout(name))
        for step in range(1, 30):
            client.send(make.frame(name, step, 6, amax=1.0, scale=448.0))
            job.train(1, nan_every=0)
        wait_for(lambda: {r.run: r for r in store.runs()}["r"].last_step >= job.step - 3, 25, "the sound run")
        time.sleep(2.0)
        job.train(5, nan_every=0)
        wait_for(lambda: {r.run: r for r in store.runs()}["r"].last_step >= job.step - 3, 25, "the sound run")
        assert controller.process is not None
        assert controller.process.poll() is None
        assert agent.process is not None
        assert agent.process.poll() is None
        assert {r.run for r in store.runs()} == {"r"}, "out of bounds is malformed: the agent drops it"
        client.close()
        store.close()


@pytest.mark.parametrize("world", [10_000_000, 1_048_576])
def test_a_huge_world_costs_other_runs_nothing(tmp_path: Path, world: int) -> None:
    with parts.cluster(tmp_path) as made:
        made.agent("n0")
        controller = made.controller("a")
        job = parts.Job(made, "r", {"n0": 1})
        store = settle(made, job)
        client = RawClient(made.socket("n0"))
        client.send(make.hello("evil", world_size=world), make.layout("evil"))
        for step in range(1, 30):
            client.send(make.frame("evil", step, 6, amax=1.0, scale=448.0))
            job.train(1, nan_every=0)
        time.sleep(7.0)  # longer than a step is waited for
        job.train(30, nan_every=0)
        runs: dict[str, RunRecord] = {}

        def caught_up() -> bool:
            runs.update({record.run: record for record in store.runs()})
            return runs["r"].last_step >= job.step - 3

        wait_for(caught_up, 15, "the sound run")
        assert "standing by" not in controller.text()
        assert ("evil" in runs) == (world <= 1_048_576)
        if "evil" in runs:
            wait_for(lambda: {r.run: r for r in store.runs()}["evil"].last_step >= 20, 15, "the rank that is there")
        client.close()
        store.close()


def test_names_that_differ_in_braces_are_two_runs(tmp_path: Path) -> None:
    names = ["a{b", "a(b", "a}b", "%", "{", "}{", "a%7Bb"]
    keys = [RunKeys(name) for name in names]
    assert len({item.frames for item in keys}) == len(names)
    assert all(item.frames.count("}") == 1 and item.frames.count("{") == 1 for item in keys)
    with parts.cluster(tmp_path) as made:
        made.agent("n0")
        made.controller("a")
        store = made.redis.store()
        clients = [RawClient(made.socket("n0")) for _ in names]
        for client, name in zip(clients, names, strict=True):
            client.send(make.hello(name), make.layout(name))
        for step in range(1, 30):
            for client, name in zip(clients, names, strict=True):
                loss = math.nan if step == 20 else 2.0
                scalars = {"loss": loss, "grad_norm": 1.0}
                client.send(make.frame(name, step, 6, amax=1.0, scale=448.0, scalars=scalars))
            time.sleep(0.02)
        wait_for(lambda: all(list(store.read(name, Finding)) for name in names), 25, "a finding in each")
        assert sorted(record.run for record in store.runs()) == sorted(names)
        for client in clients:
            client.close()
        store.close()
