"""Controllers were away for longer than frames are kept: the run is judged again, from what is kept beside them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import cluster_parts as parts
import hand_made as make
import pytest
from fake_agents import rounds
from trimmed_agents import KEYS, Agent

from fp8watch.controller.cluster import program as cluster
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import ACTIVE, LEASE
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Finding, Goodbye, Layout

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK_SECONDS", 0.05)


def controller(store: RedisStore, holder: str) -> ClusterProgram:
    return ClusterProgram(store.link, holder=holder, lease_seconds=30.0)


def gone(store: RedisStore, program: ClusterProgram) -> None:
    """The controller has remembered all it knows, and dies."""
    program._commit("r")
    store.link.client.delete(LEASE)


def found(store: RedisStore) -> set[int]:
    """Steps at which the tensors were found not to be finite."""
    return {item.step for item in store.read("r", Finding) if item.detector == "nonfinite" and item.tensor}


def test_training_began_before_the_first_controller(store: RedisStore) -> None:
    agent = Agent(store)
    agent.begin()
    agent.train(1, 10)
    agent.trim(keep=5)
    program = controller(store, "first")
    rounds(program)
    agent.train(11, 60, nan_at=[55])
    rounds(program)
    assert [layout.attempt for layout in store.read("r", Layout)] == [0]
    assert found(store) == {55}


@pytest.mark.parametrize("is_said_goodbye", [False, True])
@pytest.mark.parametrize(("attempt", "start"), [(1, ""), (0, "b" * 32), (1, "b" * 32)])
def test_training_was_restarted_meanwhile(
    store: RedisStore, attempt: int, start: str, is_said_goodbye: bool, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(store)
    agent.begin(start="a" * 32 if start else "", pid=1)
    agent.train(1, 60)
    first = controller(store, "first")
    rounds(first)
    gone(store, first)
    if is_said_goodbye:
        agent.put(Goodbye(run="r", rank=0, step=60))
    agent.attempt = attempt
    agent.begin(start=start, pid=2, step=20)
    agent.train(21, 80)
    agent.trim(keep=30)
    second = controller(store, "second")
    rounds(second, 6)
    assert "hello of n0, layout of n0" in caplog.text
    agent.train(81, 130, nan_at=[125])
    rounds(second, 6)
    second._commit("r")
    (record,) = store.runs()
    assert (record.state, record.hello.attempt, record.hello.pid) == ("running", attempt, 2)
    assert second.runs.unseen.counts["r"]["unannounced"] == 0
    pilot = second.runs.pilot("r")
    assert pilot is not None
    assert pilot.step == 130
    assert found(store) == {125}


def test_what_is_still_in_the_stream_is_taken_in_its_order(store: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
    """Frames of the attempt before are judged before the hello of the next is heard."""
    agent = Agent(store)
    agent.begin()
    agent.train(1, 40)
    first = controller(store, "first")
    rounds(first)
    gone(store, first)
    agent.train(41, 60, nan_at=[58])
    agent.attempt = 1
    agent.begin(pid=2, step=50)
    agent.train(51, 60)
    second = controller(store, "second")
    rounds(second)
    assert found(store) == {58}
    assert "no longer in the stream" not in caplog.text
    assert second.runs.unseen.counts["r"] == {}
    pilot = second.runs.pilot("r")
    assert pilot is not None
    assert (pilot.attempt, pilot.step) == (1, 60)


def test_a_controller_that_fell_behind_finds_out(store: RedisStore) -> None:
    """It lives, and yet a hello goes before it was read: the frames that it cannot judge tell it."""
    agent = Agent(store)
    agent.begin()
    agent.train(1, 40)
    program = controller(store, "slow")
    rounds(program)
    agent.attempt = 1
    agent.begin(pid=2, step=40)
    agent.trim(keep=0)
    agent.train(41, 45)
    rounds(program)
    time.sleep(0.1)
    rounds(program)  # looks again
    agent.train(46, 95, nan_at=[90])
    rounds(program)
    assert found(store) == {90}
    assert program.runs.unseen.counts["r"]["unannounced"] == 5


def test_a_rank_that_left_meanwhile_is_not_waited_for(store: RedisStore) -> None:
    agent = Agent(store)
    agent.begin()
    first = controller(store, "first")
    rounds(first)
    pilot = first.runs.pilot("r")
    assert pilot is not None
    agent.put(make.hello("r", rank=1, world_size=2))
    rounds(first)
    assert set(pilot.ranks) == {0, 1}
    gone(store, first)
    agent.put(Goodbye(run="r", rank=1, step=0))
    agent.trim(keep=0)
    second = controller(store, "second")
    rounds(second)
    pilot = second.runs.pilot("r")
    assert pilot is not None
    assert set(pilot.ranks) == {0}


def test_a_run_that_is_over_is_not_begun_and_ended_again_and_again(
    store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent says that it has ranks of it, and nothing that counts is heard of them."""
    caplog.set_level(logging.INFO)
    agent = Agent(store)
    agent.begin()
    agent.train(1, 5)
    program = controller(store, "c")
    rounds(program)
    agent.put(Goodbye(run="r", rank=0, step=5))
    store.link.client.delete(KEYS.ranks)
    parts.wait_for(lambda: program._round() and not store.link.client.sismember(ACTIVE, "r"), 10, "the end")
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        store.link.client.sadd(ACTIVE, "r")
        program._round()
    assert 1 < caplog.text.count("run r is over") <= 5
    agent.begin()  # and now it is there
    agent.train(6, 20)
    parts.wait_for(lambda: program._round() and store.runs()[0].state == "running", 10, "the run being heard")


def test_a_run_of_which_nothing_is_known_does_not_stay(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages were lost with the agent's machine; only the run's name was left among the active ones."""
    monkeypatch.setattr("fp8watch.controller.cluster.progress.MAX_PAUSE_SECONDS", 0.1)
    store.link.client.sadd(ACTIVE, "r")
    agent = Agent(store)
    agent.train(1, 2)
    program = controller(store, "c")
    parts.wait_for(lambda: program._round() and not store.link.client.sismember(ACTIVE, "r"), 10, "its end")
    assert all(store.link.client.ttl(key) != -1 for key in KEYS.to_go_on)
    agent.begin()
    agent.train(1, 20)
    parts.wait_for(lambda: program._round() and store.runs(), 10, "the run being heard")


def test_a_run_that_moved_while_nobody_looked_is_watched_once_its_first_node_is_gone(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new node's hello was trimmed: the note that it is refused makes its agent say it again."""
    monkeypatch.setattr(cluster, "MISSING_LOOKS", 2)
    first_node, second_node = Agent(store), Agent(store, "n1")
    first_node.begin()
    first_node.train(1, 20)
    first = controller(store, "first")
    rounds(first)
    gone(store, first)
    store.link.client.delete(KEYS.presence("n0"))  # dead, without a word
    second_node.begin(pid=2)
    second_node.trim(keep=0)
    second_node.train(1, 5)
    second = controller(store, "second")
    parts.wait_for(lambda: second._round() and store.link.client.exists(KEYS.contested("n1")), 10, "the note")

    def is_watched() -> bool:
        if store.link.client.exists(KEYS.contested("n1")):
            second_node.begin(pid=2)
        second._round()
        pilot = second.runs.pilot("r")
        return pilot is not None and pilot.ranks.keys() == {0} and pilot.ranks[0].pid == 2

    parts.wait_for(is_watched, 20, "the run being watched where it is")


def test_what_a_dead_agent_left_behind_brings_no_run_back(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MISSING_LOOKS", 2)
    agent = Agent(store)
    agent.begin()
    agent.train(1, 20)
    program = controller(store, "c")
    rounds(program)
    store.link.client.delete(KEYS.presence("n0"))
    parts.wait_for(lambda: program._round() and not store.link.client.sismember(ACTIVE, "r"), 10, "the end")
    assert store.link.client.hlen(KEYS.ranks) == 2
    store.link.client.sadd(ACTIVE, "r")
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        program._round()
        assert store.runs()[0].state == "lost"


def test_real_processes_find_each_other_late(tmp_path: Path) -> None:
    """The agent trims a stream that nobody reads; then the first controller comes."""
    with parts.cluster(tmp_path, environment={"FP8WATCH_REDIS_KEEP_SECONDS": "3"}) as made:
        made.agent("n0")
        store = made.redis.store()
        client = make.RawClient(made.socket("n0"))
        client.send(make.hello("r"), make.layout("r"))
        step = 0

        def train(amax: float = 1.0) -> None:
            nonlocal step
            step += 1
            client.send(make.frame("r", step, 6, amax=amax, scale=448.0, scalars={"loss": 2.0 + 0.01 * (step % 7)}))
            time.sleep(0.02)

        def is_trimmed() -> bool:
            train()
            return b"m" not in {fields[b"k"] for _, fields in store.link.client.xrange(KEYS.frames)}

        parts.wait_for(lambda: store.link.client.exists(KEYS.frames), what="frames")
        parts.wait_for(is_trimmed, 40, "hello and layout being trimmed")
        made.controller("a")

        def is_judged() -> bool:
            train()
            return bool(store.runs()) and store.runs()[0].last_step > 0

        parts.wait_for(is_judged, 30, "judged steps")
        for _ in range(50):
            train()
        train(float("nan"))

        def is_found() -> bool:
            train()
            return bool(found(store))

        parts.wait_for(is_found, 20, "what only the tensors tell")
        client.close()
        store.close()
