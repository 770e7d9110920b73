"""What a node's agent keeps beside a run's stream, and that a run that ends at once, or goes on, is not mistaken."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cluster_parts as parts
import hand_made as make
import pytest
from test_doctor_cluster import doctor

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import NODES, RunKeys
from fp8watch.controller.cluster.redis_link import connect
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Goodbye, Hello, Layout
from fp8watch.security.envelope import Envelope, Sealer, unpack
from fp8watch_agent import uplink
from fp8watch_agent.namesake import TIMES, Namesake
from fp8watch_agent.spool import Spool

pytestmark = pytest.mark.redis
KEYS = RunKeys("r")


@pytest.fixture(autouse=True)
def says_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "PRESENCE_SECONDS", 0.1)


def thread_of(store: RedisStore, folder: Path, number: int = 1, **more: object) -> uplink.UplinkThread:
    options = {"sealer": Sealer("n", number, None), **more}
    path = store.link.client.connection_pool.connection_kwargs["path"]
    return uplink.UplinkThread(
        connect(f"unix://{path}", retries=0), node="n", spool=Spool(folder, 10**7), keep_seconds=600.0,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


@contextmanager
def running(*threads: uplink.UplinkThread) -> Iterator[None]:
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.stop()


def kinds(store: RedisStore) -> list[type]:
    entries = store.link.client.xrange(KEYS.frames)
    return [type(wire.unpack_uplink(unpack(fields[b"e"]).body)) for _, fields in entries]


def beside(store: RedisStore) -> set[str]:
    return {name.decode() for name in store.link.client.hkeys(KEYS.ranks)}


def test_hello_and_layout_stay_beside_the_stream_until_the_last_rank_leaves(store: RedisStore, tmp_path: Path) -> None:
    thread = thread_of(store, tmp_path / "spool")
    with running(thread):
        for rank in range(2):
            thread.send(make.hello("r", rank=rank, world_size=2))
        thread.send(make.layout("r"))
        parts.wait_for(lambda: thread.sent == 3, what="what begins the run")
        assert beside(store) == {"0@n", "1@n", "layout@n"}
        thread.send(make.layout("r", layout_id=2, blocks=3))
        parts.wait_for(lambda: thread.sent == 4, what="another layout")
        kept = store.link.client.hget(KEYS.ranks, "layout@n")
        said = wire.unpack_uplink(unpack(kept).body)
        assert isinstance(said, Layout)
        assert (said.layout_id, len(said.columns)) == (2, 9), "the newest"
        thread.send(make.goodbye("r", rank=0))
        parts.wait_for(lambda: thread.sent == 5, what="a goodbye")
        assert beside(store) == {"1@n", "layout@n"}
        thread.send(make.goodbye("r", rank=1))
        parts.wait_for(lambda: not beside(store), what="nothing being left")


class Hurried(Sealer):
    """Calls `meanwhile` while a message is being sealed, as another thread may do."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def seal(self, body: bytes) -> Envelope:
        self.meanwhile()
        return super().seal(body)


def test_a_run_that_ends_while_its_hello_is_being_sent_is_heard(store: RedisStore, tmp_path: Path) -> None:
    sealer = Hurried("n", 1, None)
    thread = thread_of(store, tmp_path / "spool", sealer=sealer)
    sealer.meanwhile = lambda: thread.forget("r")
    for message in (make.hello("r"), make.layout("r"), make.goodbye("r")):
        thread.send(message)
    with running(thread):
        parts.wait_for(lambda: len(kinds(store)) == 3, what="all of the run")
        assert kinds(store) == [Hello, Layout, Goodbye]
        assert thread.dropped == {}
        parts.wait_for(lambda: not beside(store), what="nothing being left")


@pytest.mark.parametrize("says", ["announce_again", "learn_term"])
def test_a_run_that_has_ended_is_not_announced_again(store: RedisStore, tmp_path: Path, says: str) -> None:
    """What another thread wants changed comes in its turn: a hello after the goodbye would never end."""
    thread = thread_of(store, tmp_path / "spool")
    thread.send(make.hello("r"))
    thread.send(make.goodbye("r"))
    thread.announce_again("r") if says == "announce_again" else thread.learn_term("r", 7)
    with running(thread):
        parts.wait_for(lambda: thread.sent == 2, what="both")
        time.sleep(0.5)
        assert kinds(store) == [Hello, Goodbye]
        about = json.loads(store.link.client.hget(NODES, "n"))
        assert about["runs"] == []
        assert not store.link.client.exists(KEYS.presence("n"))


def test_ranks_that_are_announced_again_know_the_newest_term(store: RedisStore, tmp_path: Path) -> None:
    thread = thread_of(store, tmp_path / "spool")
    with running(thread):
        thread.send(make.hello("r"))
        thread.learn_term("r", 7)
        thread.announce_again("r")
        parts.wait_for(lambda: thread.sent == 2, what="the hello, twice")
        messages = [wire.unpack_uplink(unpack(f[b"e"]).body) for _, f in store.link.client.xrange(KEYS.frames)]
        assert [message.journal_term for message in messages if isinstance(message, Hello)] == [0, 7]


def test_what_an_end_let_expire_is_kept_when_the_run_goes_on(store: RedisStore, tmp_path: Path) -> None:
    """No controller runs that could do it."""
    client = store.link.client
    client.xadd(KEYS.frames, {"k": "m", "e": b"of the run before"})
    for key in (KEYS.state, KEYS.fence, KEYS.ranks):
        client.hset(key, "a", "b")
    client.xadd(KEYS.commands, {"b": b"of the run before"})
    for key in KEYS.to_go_on:
        client.expire(key, 600)
    thread = thread_of(store, tmp_path / "spool")
    with running(thread):
        time.sleep(0.4)
        assert all(client.ttl(key) > 0 for key in KEYS.to_go_on), "it has not gone on yet"
        thread.send(make.hello("r"))
        parts.wait_for(lambda: all(client.ttl(key) == -1 for key in KEYS.to_go_on), 5, "all of it being kept")
        client.expire(KEYS.frames, 600)  # a controller that had not heard the hello yet
        parts.wait_for(lambda: client.ttl(KEYS.frames) == -1, 5, "it being kept once more")


def test_two_living_agents_of_one_name_say_so(
    store: RedisStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[list[str]] = [[], []]
    threads = [thread_of(store, tmp_path / str(i), number=1 + i, on_error=errors[i].append) for i in range(2)]
    pids = {thread: 100 + i for i, thread in enumerate(threads)}
    monkeypatch.setattr(uplink.os, "getpid", lambda: pids.get(threading.current_thread(), 1))  # type: ignore[call-overload]
    for thread, pid in pids.items():
        thread._namesake = Namesake(pid, thread._since_unix, time.monotonic)
    with running(*threads):
        parts.wait_for(lambda: all("node_name_taken" in found for found in errors), 10, "both knowing of the other")
    said = [line for line in caplog.messages if "another agent is alive under the name of this node, n" in line]
    assert len(said) == 2
    assert any("process 100" in line for line in said)
    assert any("process 101" in line for line in said)
    path = store.link.client.connection_pool.connection_kwargs["path"]
    result, words = doctor(f"unix://{path}")[1]["agent n"]
    assert result == "problem"
    assert "two agents are alive under this name" in words
    assert "FP8WATCH_NODE" in words


def test_a_restarted_agent_has_no_namesake(store: RedisStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(1, 4):
        thread = thread_of(store, tmp_path / "spool", number=number)
        with running(thread):
            thread.send(make.hello("r"))
            parts.wait_for(lambda thread=thread: thread.sent == 1, what="its hello")  # type: ignore[misc]
            time.sleep(0.5)
    assert "another agent" not in caplog.text


def test_a_namesake_is_alive_when_it_is_heard_of_again_and_again() -> None:
    now = 0.0
    own = Namesake(1, 10.0, lambda: now)
    other = json.dumps({"pid": 2, "started_unix": 11.0, "host": "h"}).encode()
    assert own.look(other) == "", "a predecessor's"
    for _ in range(TIMES - 1):
        assert own.look(other) == ""
    assert own.look(other) == "process 2 on host h"
    assert own.look(json.dumps({"pid": 1, "started_unix": 10.0}).encode()) == "process 2 on host h"
    now = 100.0
    assert own.look(None) == own.look(b"{") == own.look(b"[]") == ""
