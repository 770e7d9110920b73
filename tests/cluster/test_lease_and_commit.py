"""One active controller: a lease with a term that only grows, and commits that an older term cannot make."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import cluster_parts as parts
import msgspec
import pytest
import redis as redis_py
from hand_made import goodbye, hello

from fp8watch import wire
from fp8watch.controller.cluster.inflow import Entered, Inflow
from fp8watch.controller.cluster.lease import Lease
from fp8watch.controller.cluster.outbox import Fenced, Interrupted, Outbox
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import GROUP, LEASE, TERM, RunKeys
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Command, Evaluation, Goodbye, RunRecord
from fp8watch.security.envelope import Sealer

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parts.Redis]:
    made = parts.Redis(tmp_path_factory.mktemp("lease"))
    made.start()
    yield made
    made.kill()


@pytest.fixture
def store(server: parts.Redis) -> Iterator[RedisStore]:
    opened = server.store()
    opened.link.client.flushall()
    yield opened
    opened.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def command(sequence: int, term: int = 1) -> Command:
    return Command(
        id=f"a{sequence}", run="r", attempt=0, term=term, sequence=sequence, verb="apply", action="halt", last_step=9
    )


def sent(store: RedisStore) -> list[str]:
    entries = store.link.client.xrange(RunKeys("r").commands)
    return [getattr(wire.unpack_reply(fields[b"b"]), "id", "") for _, fields in entries]


def outbox(store: RedisStore, term: int) -> Outbox:
    made = Outbox(store)
    made.term = term
    made.claim("r")
    made.revive("r")
    return made


def test_only_one_holds_it_and_each_holder_has_a_higher_term(store: RedisStore) -> None:
    first = Lease(store.link, "one", 5.0, Clock())
    second = Lease(store.link, "two", 5.0, Clock())
    held = first.acquire()
    assert held is not None
    assert held.term == 1
    assert second.acquire() is None
    assert second.seen == "1:one"
    first.release()
    taken = second.acquire()
    assert taken is not None
    assert taken.term == 2
    assert not taken.is_unbroken
    assert first.acquire() is None


def test_a_name_that_begins_or_ends_with_another_is_another_holder(store: RedisStore) -> None:
    held = Lease(store.link, "ctrl-10", 5.0, Clock())
    assert held.acquire() is not None
    for name in ("ctrl-1", "ctrl", "10", "l-10", "1:ctrl-10", "c"):
        other = Lease(store.link, name, 5.0, Clock())
        assert other.acquire() is None, name
        assert other.seen == "1:ctrl-10"
    again = Lease(store.link, "ctrl-10", 5.0, Clock())
    assert again.acquire() is not None


def test_two_controllers_of_one_name_do_not_take_each_others_lease(tmp_path: Path) -> None:
    with parts.cluster(tmp_path) as made:
        for _ in range(2):
            made.controller("ctrl")
        log = made.controllers[0]
        parts.wait_for(lambda: log.text().count("stands by at") == 2 and "active under" in log.text(), what="both")
        time.sleep(4.0)  # longer than a lease
        assert log.text().count("active under") == 1
        store = made.redis.store()
        assert store.link.client.get(TERM) == b"1"
        assert store.link.client.get(LEASE).startswith(b"1:ctrl-")
        store.close()


# case: RED-15
# case: DST-06
def test_a_holder_steps_down_by_its_own_monotonic_clock(store: RedisStore) -> None:
    clock = Clock()
    lease = Lease(store.link, "one", 5.0, clock)
    lease.acquire()
    clock.now += 4.9
    assert lease.is_held
    clock.now += 0.2
    assert not lease.is_held, "whatever Redis thinks"
    assert lease.renew()
    store.link.client.set(LEASE, "9:other")
    clock.now += 3.0
    assert not lease.renew()
    assert not lease.is_held


# case: DST-06
def test_a_lease_whose_end_was_put_off_by_a_clock_set_back_does_not_keep_everybody_out(store: RedisStore) -> None:
    store.link.client.set(LEASE, "1:dead", px=3_600_000)
    store.link.client.set(TERM, 1)
    lease = Lease(store.link, "two", 0.05, Clock())
    assert lease.acquire() is None
    taken = parts.wait_for(lease.acquire, what="the end of the other's lease")
    assert taken.term == 2
    store.link.client.set(LEASE, "3:other", px=50_000)
    assert Lease(store.link, "three", 6.0, Clock()).acquire() is None
    assert store.link.client.pttl(LEASE) > 30_000, "a lease that is merely longer than ours is left alone"


def test_lost_terms_do_not_wedge_and_are_noticed_as_lost(store: RedisStore) -> None:
    clock = Clock()
    lease = Lease(store.link, "one", 5.0, clock)
    lease.acquire()
    store.link.client.set(TERM, 7)
    store.link.client.delete(LEASE)
    clock.now += 10
    taken = lease.acquire()
    assert taken is not None
    assert (taken.term, taken.is_unbroken) == (8, False), "others held it meanwhile"
    store.link.client.flushall()
    clock.now += 10
    again = lease.acquire()
    assert again is not None
    assert (again.term, again.is_unbroken) == (9, True), "higher than any that this one knows"


def test_a_commit_writes_all_or_nothing_and_takes_entries_off_the_list(store: RedisStore) -> None:
    client, keys = store.link.client, RunKeys("r")
    client.xgroup_create(keys.frames, GROUP, id="0", mkstream=True)
    entry = client.xadd(keys.frames, {"x": "y"})
    client.xreadgroup(GROUP, "c", {keys.frames: ">"})
    box = outbox(store, 1)
    run = RunRecord(run="r", state="running", hello=hello("r"), started_unix=1.0, updated_unix=1.0)
    box.append("r", [run, Evaluation(run="r", attempt=0, step=1, scores={})])
    box.command("r", [command(1)])
    assert store.runs() == [] == sent(store), "nothing is on its way before the commit"
    assert box.commit("r", memory={"memory": b"m"}, done=[entry.decode()])
    assert [item.run for item in store.runs()] == ["r"]
    assert sent(store) == ["a1"]
    assert client.xpending(keys.frames, GROUP)["pending"] == 0
    assert client.hget(keys.state, "memory") == b"m"


# case: RED-15
def test_an_older_term_can_write_nothing(store: RedisStore) -> None:
    old, new = outbox(store, 1), outbox(store, 2)
    old.command("r", [command(1)])
    with pytest.raises(Fenced):
        old.commit("r", memory={"memory": b"old"}, done=[])
    assert sent(store) == []
    new.command("r", [command(2, 2)])
    new.commit("r", memory={}, done=[])
    assert sent(store) == ["a2"]
    with pytest.raises(Fenced):
        outbox(store, 1)


# case: RED-01
@pytest.mark.parametrize("arrives", [True, False], ids=["only the answer was lost", "it never arrived"])
@pytest.mark.parametrize("has_new_term", [True, False])
def test_a_commit_without_an_answer_is_made_once(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, arrives: bool, has_new_term: bool
) -> None:
    box = outbox(store, 1)
    box.command("r", [command(1)])
    real = store.link.client.eval

    def breaks(*arguments: object) -> object:
        if arrives:
            real(*arguments)
        raise redis_py.TimeoutError("no answer")

    monkeypatch.setattr(store.link.client, "eval", breaks)
    with pytest.raises(redis_py.TimeoutError):
        box.commit("r", memory={}, done=[])
    monkeypatch.setattr(store.link.client, "eval", real)
    if has_new_term:  # its lease had ended meanwhile, nobody had come, and it goes on
        box.term = 2
        box.claim("r")
        box.claim("r")
    box.command("r", [command(2)])
    box.commit("r", memory={}, done=[])
    assert sent(store) == ["a1", "a2"]


def test_a_run_that_redis_has_lost_is_noticed(store: RedisStore) -> None:
    box = outbox(store, 1)
    assert box.commit("r", memory={}, done=[])
    store.link.client.flushall()
    assert not box.commit("r", memory={}, done=[])
    assert box.commit("r", memory={}, done=[])


# case: RED-07
def test_an_answer_that_was_lost_on_the_way_is_asked_for_again(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has given entries to us that we never received: no later read would bring them by itself."""
    sealer, keys = Sealer("n", 1, None), RunKeys("r")

    def add(step: int) -> None:
        store.link.client.xadd(keys.frames, {"e": msgspec.msgpack.encode(sealer.seal(wire.pack(goodbye("r", step))))})

    inflow = Inflow(store.link, "c", None)
    add(1)
    assert inflow.join("r", "0-0", {}) == []
    assert [item.message.step for item in inflow.read(10)] == [1]
    add(2)
    add(3)
    real = store.link.client.xreadgroup

    def breaks(*arguments: object, **options: object) -> object:
        real(*arguments, **options)
        raise redis_py.TimeoutError("no answer")

    monkeypatch.setattr(store.link.client, "xreadgroup", breaks)
    with pytest.raises(redis_py.TimeoutError):
        inflow.read(10)
    monkeypatch.setattr(store.link.client, "xreadgroup", real)
    add(4)
    steps = [item.message.step for _ in range(3) for item in inflow.read(10)]
    assert steps == [2, 3, 4]


def test_a_message_that_redis_interrupted_is_dealt_with_again_and_those_after_it_too(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ClusterProgram(store.link, holder="c")
    program._round()
    program._join("r")
    entries = [Entered("r", f"{n}-0", goodbye("r", n), "n") for n in (1, 2, 3)]
    taken: list[int] = []

    def take(message: Goodbye, entry_id: str, node: str) -> list[object]:
        if message.step == 2 and 2 not in fails:
            fails.append(2)
            raise Interrupted(redis_py.ConnectionError("away"))
        taken.append(message.step)
        return []

    fails: list[int] = []
    monkeypatch.setattr(program.runs, "take", take)
    with pytest.raises(Interrupted):
        program._take(entries)
    program._take([Entered("r", "4-0", goodbye("r", 4), "n")])
    assert taken == [1, 2, 3, 4]


def test_a_store_that_cannot_be_read_does_not_make_a_run_an_unknown_one(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ClusterProgram(store.link, holder="c")

    def away(*_: object) -> None:
        raise redis_py.ConnectionError("away")

    monkeypatch.setattr(store.link.client, "get", away)
    with pytest.raises(Interrupted):
        program.runs.take(hello("r"))
    assert program.runs.pilot("r") is None
