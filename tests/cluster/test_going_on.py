"""What a controller or a run leaves behind when it ends, and what whoever goes on makes of it."""

from __future__ import annotations

import cluster_parts as parts
import pytest
from fake_agents import KEYS, Agents, rounds, until

from fp8watch.controller.cluster import program as cluster
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import ACTIVE, LEASE
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Finding, Goodbye, RankLost

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK_SECONDS", 0.1)


# case: RED-02
def test_what_was_read_of_an_open_step_is_judged_by_the_successor_once(store: RedisStore) -> None:
    agents = Agents(store)
    agents.hello()
    agents.train(1, 3)
    agents.frame("a", 4, loss=float("nan"))  # and b's is still on its way
    first = ClusterProgram(store.link, holder="first", lease_seconds=30.0)
    rounds(first)
    first._commit("r")  # it remembers that it has read the frame: only its effect is not kept
    pilot = first.runs.pilot("r")
    assert pilot is not None
    assert pilot.closed == (0, 3)
    genuine = store.link.client.xrange(KEYS.frames)[-1][1]
    store.link.client.delete(LEASE)  # as when its time is over

    second = ClusterProgram(store.link, holder="second", lease_seconds=30.0)
    rounds(second)
    store.link.client.xadd(KEYS.frames, genuine)  # somebody sends the same entry again
    agents.frame("b", 4)
    agents.train(5, 5)
    rounds(second)
    assert second.runs.unseen.counts["r"] == {}
    assert [item.step for item in store.read("r", Finding)] == [4]
    assert second.inflow.refused == {("r", "repeated"): 1}
    second._commit("r")
    assert store.link.client.xpending(KEYS.frames, "controller")["pending"] == 0


@pytest.mark.parametrize("ending", [Goodbye, RankLost])
def test_a_run_that_was_over_goes_on_under_the_same_controller(store: RedisStore, ending: type) -> None:
    """Started again, or heard again after its nodes were cut off for long: it is judged, and what is found is kept."""
    agents = Agents(store)
    program = ClusterProgram(store.link, holder="c", lease_seconds=30.0)
    agents.hello()
    agents.train(1, 10, nan_at=5)
    until(program, "running")
    for first in (11, 61):
        agents.end(ending)
        until(program, "ended" if ending is Goodbye else "lost")
        parts.wait_for(lambda: program._round() and not store.link.client.sismember(ACTIVE, "r"), 10, "the end")
        if ending is Goodbye:
            agents.attempt += 1
            agents.hello()
        agents.train(first, first + 20)
        if ending is RankLost:
            agents.hello()  # what waited on disk comes first
        agents.train(first + 21, first + 49, nan_at=first + 44)
        until(program, "running")
        rounds(program)
    assert [item.step for item in store.read("r", Finding)] == [5, 55, 105]
    pilot = program.runs.pilot("r")
    assert pilot is not None
    assert pilot.detector_errors == 0
