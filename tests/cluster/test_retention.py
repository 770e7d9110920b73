"""What Redis keeps of runs that ended, and of agents that are gone, is bounded; nothing that is needed goes."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import hand_made as make
import pytest
from fake_agents import Agents, rounds

from fp8watch import wire
from fp8watch.controller.cluster import retention
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import ACTIVE, NODES, RUNS, RunKeys
from fp8watch.controller.cluster.retention import DAY, NAMES, REMOVED, Retention
from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Arrival, Finding, RunRecord

pytestmark = pytest.mark.redis


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """A `Retention`, a step at a time."""

    def __init__(self, store: RedisStore, *, keep_days: float = 30.0, keep_runs: int = 1000) -> None:
        self._clock = Clock()
        self.retention = Retention(store, keep_days=keep_days, keep_runs=keep_runs, clock=self._clock)

    def __call__(self, count: int = 1, busy: frozenset[str] = frozenset()) -> None:
        for _ in range(count):
            self._clock.now += retention.STEP_SECONDS
            self.retention.step(busy)


def add(store: RedisStore, run: str, *, days_ago: float, state: Any = "ended") -> None:
    """A run with a record of every kind that matters here, as of then."""
    then = time.time() - days_ago * DAY
    hello = make.hello(run)
    record = RunRecord(run=run, state=state, hello=hello, started_unix=then, updated_unix=then)
    finding = Finding(
        run=run, id="1", incident="1", attempt=0, step=3, detector="stuck", cause="unknown", severity="warn",
        onset_step=3,
    )  # fmt: skip
    arrival = Arrival(run=run, sequence=1, kind="opened")
    store.append(run, [record, make.layout(run), finding, arrival])
    store.approve(Approval(run=run, action_id="1", verdict="refuse"))


def left(store: RedisStore, run: str) -> set[str]:
    head = RunKeys(run).run.removesuffix("run")
    return {key.decode().removeprefix(head) for key in store.link.client.keys(f"{head}*")}


def test_a_run_that_ended_long_ago_goes_with_all_its_records(store: RedisStore) -> None:
    add(store, "old", days_ago=31)
    add(store, "young", days_ago=29)
    add(store, "vanished", days_ago=31, state="running")  # its end was never seen
    client = store.link.client
    client.set(RunKeys("old").disarm, "1")
    client.xadd(RunKeys("old").frames, {"b": b"x"})
    before = left(store, "young")
    assert {"run", "layout", "layout:order", "finding", "arrival", "approvals", "order"} <= before
    Steps(store)(2)
    assert left(store, "old") == {"disarm", "frames"}, "a person's stop stays, and a stream goes by itself"
    assert 0 < client.ttl(RunKeys("old").frames) <= 600
    assert left(store, "vanished") == set()
    assert left(store, "young") == before
    assert client.smembers(RUNS) == {b"young"}


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_run_that_an_agent_has_ranks_of_stays_however_old_its_record_is(store: RedisStore, is_followed: bool) -> None:
    add(store, "r", days_ago=400)
    if not is_followed:
        store.link.client.sadd(ACTIVE, "r")
    steps = Steps(store)
    steps(5, busy=frozenset({"r"}) if is_followed else frozenset())
    assert next(store.read("r", RunRecord)).run == "r"
    store.link.client.srem(ACTIVE, "r")
    steps(5)
    assert next(store.read("r", RunRecord), None) is None


def test_of_too_many_runs_the_oldest_go_before_their_time(store: RedisStore) -> None:
    for number in range(20):
        add(store, f"run-{number}", days_ago=1 + number)
    steps = Steps(store, keep_runs=5)
    steps(1)
    assert store.link.client.scard(RUNS) >= 20 - REMOVED, "a few at once"
    steps(5)
    assert {record.run for record in store.runs()} == {f"run-{number}" for number in range(5)}


def test_names_without_a_record_go(store: RedisStore) -> None:
    store.link.client.sadd(RUNS, *(f"name-{number}" for number in range(10)))
    Steps(store)(4)
    assert not store.link.client.exists(RUNS)


def test_agents_gone_for_long_are_no_longer_listed(store: RedisStore) -> None:
    client = store.link.client
    for number in range(300):
        client.hset(NODES, f"gone-{number}", json.dumps({"time_unix": time.time() - 20 * DAY, "runs": ["r" * 100]}))
    client.hset(NODES, "away", json.dumps({"time_unix": time.time() - 6 * DAY}))
    client.hset(NODES, "odd", b"{")  # the doctor says so
    steps = Steps(store)
    steps(1)
    assert client.hlen(NODES) > 300 - 3 * NAMES, "in small steps"
    steps(15)
    assert client.hkeys(NODES) in ([b"away", b"odd"], [b"odd", b"away"])


def test_a_controller_without_the_right_says_so_once_and_goes_on(
    store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store.link.client.set(RUNS, "not what it should be")
    Steps(store)(5)
    assert caplog.text.count("cannot be removed") == 1


def test_the_active_controller_does_it(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "STEP_SECONDS", 0.0)
    add(store, "old", days_ago=3)
    agents = Agents(store)
    agents.hello()
    agents.train(1, 5)
    program = ClusterProgram(store.link, holder="c", lease_seconds=30.0, keep_days=2.0)
    rounds(program, 8)
    assert {record.run for record in store.runs()} == {"r"}


def test_a_new_run_costs_the_same_however_many_old_ones_there_are(store: RedisStore) -> None:
    body = wire.pack(RunRecord(run="x", state="ended", hello=make.hello("x"), started_unix=1.0, updated_unix=1.0))
    client = store.link.client
    for number in range(500):
        client.set(RunKeys(f"old-{number}").run, body)
        client.sadd(RUNS, f"old-{number}")
    agents = Agents(store)
    agents.hello()
    agents.train(1, 5)
    client.config_resetstat()
    program = ClusterProgram(store.link, holder="c", lease_seconds=30.0)
    rounds(program)
    assert client.info("commandstats")["cmdstat_get"]["calls"] < 20
    assert next(store.read("r", RunRecord)).hello.run == "r"
