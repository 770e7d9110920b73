"""`fp8watch doctor --cluster` names what is wrong, against real servers; a sound deployment has no problem."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import cluster_parts as parts
import pytest
from redis import RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.controller.cluster.lease import Lease
from fp8watch.controller.cluster.redis_keys import NODES
from fp8watch.controller.cluster.redis_link import words_of
from fp8watch.controller.stores.redis import RedisStore

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parts.Redis]:
    made = parts.Redis(tmp_path_factory.mktemp("doctor"))
    made.start()
    yield made
    made.kill()


@pytest.fixture
def store(redis: parts.Redis) -> Iterator[RedisStore]:
    opened = redis.store()
    opened.link.client.replicaof("NO", "ONE")
    opened.link.client.flushall()
    for name, value in {"maxmemory": "0", "maxmemory-policy": "noeviction", "appendonly": "yes"}.items():
        opened.link.client.config_set(name, value)
    yield opened
    opened.close()


def doctor(url: str, *options: str) -> tuple[int, dict[str, tuple[str, str]]]:
    result = CliRunner().invoke(build(), ["doctor", "--cluster", "--redis", url, "--json", *options])
    rows = json.loads(result.stdout)
    return result.exit_code, {row["name"]: (row["result"], row["detail"]) for row in rows}


def tell(store: RedisStore, node: str, **fields: object) -> None:
    about = {"node": node, "time_unix": time.time(), "version": "1", "wire_version": 1, "ranks": 8} | fields
    store.link.client.hset(NODES, node, json.dumps(about))


def lead(store: RedisStore) -> Lease:
    lease = Lease(store.link, "c1", 30.0, time.monotonic)
    assert lease.acquire() is not None
    return lease


def test_a_sound_deployment_has_no_problem(redis: parts.Redis, store: RedisStore) -> None:
    lead(store)
    tell(store, "n0")
    code, found = doctor(redis.url, "--expect-agents", "1")
    assert code == 0, found
    assert found["controller"] == ("ok", "c1 decides, term 1")
    assert found["redis persistence"][0] == found["redis memory"][0] == found["agent n0"][0] == "ok"


def test_what_is_wrong_is_named(redis: parts.Redis, store: RedisStore) -> None:
    tell(store, "silent", time_unix=time.time() - 100)
    tell(store, "ahead", time_unix=time.time() + 3600)
    tell(store, "old", wire_version=99)
    tell(store, "full", spool_bytes=5 * 2**20)
    tell(store, "losing", dropped={"spool_full": 7})
    store.link.client.hset(NODES, "broken", "{")
    store.link.client.config_set("maxmemory", "100mb")
    store.link.client.config_set("maxmemory-policy", "allkeys-lru")
    store.link.client.config_set("appendonly", "no")
    code, found = doctor(redis.url, "--expect-agents", "9")
    assert code == 3
    expected = {
        "agent ahead": "clock", "agent old": "wire version 99", "agent full": "5.0 MiB wait on its disk",
        "agent losing": "7 spool_full", "agent broken": "cannot be read", "agents": "4 of 9 expected",
        "redis memory": "may evict decisions", "redis persistence": "appendonly is off", "controller": "none is active",
    }  # fmt: skip
    for name, words in expected.items():
        assert found[name][0] == "problem", name
        assert words in found[name][1], name
    assert found["agent silent"][0] == "absent"


def test_a_replica_and_no_server_at_all_are_named(redis: parts.Redis, store: RedisStore, tmp_path: Path) -> None:
    store.link.client.replicaof("127.0.0.1", "1")
    assert "read-only" in doctor(redis.url)[1]["redis role"][1]
    code, found = doctor(f"unix://{tmp_path}/nothing.sock")
    assert code == 3
    assert "away" in found["redis"][1]
    assert "not one of" in doctor("http://x")[1]["redis"][1]


def test_sentinels_that_do_not_answer_are_named_in_few_words() -> None:
    patience = {"socket_connect_timeout": 0.2, "retry": Retry(NoBackoff(), 0), "password": "secret"}
    sentinel = Sentinel([("127.0.0.1", 1), ("127.0.0.1", 2)], sentinel_kwargs=patience)
    with pytest.raises(RedisError) as away:
        sentinel.discover_master("mymaster")
    assert len(str(away.value)) > 1000, "redis-py has learned to be brief: words_of has nothing to do any more"
    said = words_of(away.value)
    assert "No master found for 'mymaster'" in said
    assert "127.0.0.1:1 - " in said
    assert "127.0.0.1:2 - " in said
    assert len(said) < 300, said


def test_who_may_connect_to_the_agent_is_looked_at(redis: parts.Redis, store: RedisStore, tmp_path: Path) -> None:
    import socket

    path = tmp_path / "a.sock"
    assert "is the agent running" in doctor(redis.url, "--agent-socket", f"unix://{path}")[1]["agent socket"][1]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        server.listen()
        path.chmod(0o600)
        assert doctor(redis.url, "--agent-socket", f"unix://{path}")[1]["agent socket"][0] == "ok"
        path.chmod(0o666)
        assert "lets others connect" in doctor(redis.url, "--agent-socket", f"unix://{path}")[1]["agent socket"][1]
        tmp_path.chmod(0o777)
        path.chmod(0o600)
        assert "by everybody" in doctor(redis.url, "--agent-socket", f"unix://{path}")[1]["agent socket"][1]
