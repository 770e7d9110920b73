"""What only the Redis store does: addresses, order in streams, trimming by age, nodes' frames, failover."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import redis
import redis_servers
from test_stores import action, finding, frame, run_record

from fp8watch import wire
from fp8watch.controller.cluster import redis_link
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.errors import BadInput
from fp8watch.records import Column, Evaluation, Finding, NodeFrame, RunRecord, StepFrame
from fp8watch.security.envelope import Sealer

pytestmark = pytest.mark.redis


@pytest.fixture
def store(empty_redis: Callable[[str], RedisStore]) -> Iterator[RedisStore]:
    with contextlib.closing(empty_redis("redis")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("http://h", "http"), ("localhost:6379", "localhost"), ("redis+sentinel://h:1", "name of the service"),
        ("redis://h:notaport", "port"),
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_with_its_form(url: str, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        redis_link.connect(url)


def test_no_password_is_ever_shown() -> None:
    link = redis_link.connect("redis://user:secret@h:1/0?ssl_cert_reqs=none")
    assert link.shown == "redis://h:1/0"
    assert "secret" not in repr(link)
    link.close()


# case: RED-10
def test_a_blocking_read_ends_before_the_socket_gives_up(store: RedisStore) -> None:
    """An idle stream is no error: what is waited for in Redis is well under what the connection waits for."""
    assert redis_link.BLOCK_MS / 1000 < redis_link.CALL_SECONDS / 2
    link = redis_link.connect(_url(store), call_seconds=1.0)
    with contextlib.closing(link):
        assert link.client.get_connection_kwargs()["socket_timeout"] == 1.0
        assert not link.client.xread({"nothing": "$"}, block=200)
        with pytest.raises(redis.TimeoutError):
            link.client.xread({"nothing": "$"}, block=4000)


def _url(store: RedisStore) -> str:
    options = store.link.client.get_connection_kwargs()
    return f"redis://{options['host']}:{options['port']}/0"


def test_a_frozen_server_is_noticed_and_not_waited_for(tmp_path: Path) -> None:
    import os
    import signal

    server = redis_servers.Server(tmp_path)
    try:
        store = RedisStore(redis_link.connect(server.url, call_seconds=1.0))
        store.append("r", [frame(1)])
        os.kill(server.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(redis.TimeoutError):
            store.append("r", [frame(2)])
        assert time.monotonic() - began < 10.0
        os.kill(server.process.pid, signal.SIGCONT)
        store.append("r", [frame(3)])
        store.close()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        server.end()


def test_old_frames_go_and_nothing_else(store: RedisStore) -> None:
    store.append("r", [run_record(), action("a1"), finding(1)])
    client, keys = store.link.client, RunKeys("r")
    now = int(time.time() * 1000)
    for position in range(200):
        age = 900_000 if position < 150 else 10_000
        client.xadd(keys.frames, {"b": wire.pack(frame(position + 1))}, id=f"{now - age}-{position}")
    big = Column(dtype="u1", data=bytes(5000))  # a frame of some size has a node of the stream to itself
    client.xadd(keys.frames, {"b": wire.pack(msgspec.structs.replace(frame(999), columns={"x": big}))})
    assert store.prune("r") >= 100
    kept = [item.step for item in store.read("r", StepFrame)]
    assert kept[-51:] == [*range(151, 201), 999]
    assert len(kept) <= 101, "trimmed by whole nodes of the stream"
    assert len(list(store.read("r", Finding))) == 1
    assert [item.state for item in store.runs()] == ["running"]


def test_a_nodes_frame_is_read_as_its_ranks(store: RedisStore) -> None:
    node = NodeFrame(
        run="r", attempt=0, node="n", rank=4, step=7, layout_id=2, time_unix=1.0, ranks=[4, 5],
        scalars=[{"loss": 1.0}, {"loss": 2.0}],
        columns={"amax": Column(dtype="f4", data=bytes(8)), "amax_rank": Column(dtype="u1", data=bytes(2))},
    )  # fmt: skip
    sealed = msgspec.msgpack.encode(Sealer("n", 1, None).seal(wire.pack(node)))
    for _ in range(2):  # sent twice
        store.link.client.xadd(RunKeys("r").frames, {"k": "n", "e": sealed})
    store.link.client.xadd(RunKeys("r").frames, {"k": "n", "e": b"garbage"})
    store.link.client.xadd(RunKeys("r").frames, {"x": b"y"})
    read = list(store.read("r", StepFrame))
    assert [(item.rank, item.step, item.scalars["loss"]) for item in read] == [(4, 7, 1.0), (5, 7, 2.0)]
    assert list(read[0].columns) == ["amax"]
    assert read[0].layout_id == 2
    assert not read[1].columns


def test_an_append_is_all_or_nothing(store: RedisStore) -> None:
    store.link.client.set(RunKeys("r").kind("finding"), "of another type")
    with pytest.raises(redis.ResponseError):
        store.append("r", [action("a1"), finding(1)])
    store.append("r", [action("a2")])
    assert store.link.client.hexists(RunKeys("r").kind("action"), "a2")


def test_records_without_identity_are_all_kept_in_order(store: RedisStore) -> None:
    for step in (5, 3, 5):
        store.append("r", [Evaluation(run="r", attempt=0, step=step, scores={"t": float(step)})])
    assert [item.step for item in store.read("r", Evaluation)] == [5, 3, 5]
    assert [item.step for item in store.read("r", Evaluation, 4)] == [5, 5]


def test_many_records_are_read_in_pieces(store: RedisStore) -> None:
    store.append("r", [finding(step, f"f{step}") for step in range(1, 1001)])
    assert [item.step for item in store.read("r", Finding)] == list(range(1, 1001))


def test_a_run_name_cannot_leave_its_slot(store: RedisStore) -> None:
    name = "a}b{c"
    store.append(name, [run_record(run=name), finding(1)])
    assert [item.run for item in store.runs()] == [name]
    assert len(list(store.read(name, Finding))) == 1
    assert next(iter(store.read(name, RunRecord))).run == name


# case: RED-08
def test_writes_go_on_after_a_failover(tmp_path: Path) -> None:
    """The master dies, the sentinel makes the replica the master: the same store writes to it without being told."""
    master = redis_servers.Server(tmp_path / "m")
    replica = redis_servers.Server(tmp_path / "r", "--replicaof", f"127.0.0.1 {master.port}")
    guard = redis_servers.sentinel(tmp_path / "s", master)
    try:
        redis_servers.until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        redis_servers.until(lambda: guard.client.sentinel_slaves("fp8"))
        store = RedisStore(f"redis+sentinel://127.0.0.1:{guard.port}/fp8/0")
        store.append("r", [run_record(), finding(1)])
        store.link.client.wait(1, 2000)  # on the connection that wrote
        master.end()

        def write() -> bool:
            try:
                store.append("r", [finding(2, "f2")])
            except redis.RedisError as error:
                store.link.reset() if redis_link.reason_of(error) == "read_only" else None
                return False
            return True

        redis_servers.until(write)
        assert [item.id for item in store.read("r", Finding)] == ["f1", "f2"]
        assert replica.client.role()[0] in (b"master", "master")
        store.close()
    finally:
        for server in (guard, replica, master):
            server.end()


# case: RED-08
def test_a_read_only_server_is_named_as_such(tmp_path: Path) -> None:
    server = redis_servers.Server(tmp_path / "x", "--replicaof", "127.0.0.1 1")
    try:
        store = RedisStore(server.url)
        with pytest.raises(redis.RedisError) as caught:
            store.append("r", [finding(1)])
        assert redis_link.reason_of(caught.value) == "read_only"
        server.client.replicaof("NO", "ONE")
        store.append("r", [finding(1)])
        store.close()
    finally:
        server.end()


# case: RED-12
def test_a_full_server_is_named_as_such(tmp_path: Path) -> None:
    server = redis_servers.Server(tmp_path / "x", "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    try:
        store = RedisStore(server.url)
        big = Column(dtype="u1", data=bytes(100_000))
        frames = [msgspec.structs.replace(frame(step), columns={"x": big}) for step in range(1, 40)]
        for part in frames[:3]:
            store.append("r", [part])
        with pytest.raises(redis.RedisError) as caught:
            store.append("r", frames)
        assert redis_link.reason_of(caught.value) == "out_of_memory"
        store.close()
    finally:
        server.end()
