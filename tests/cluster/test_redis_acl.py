"""docs/redis-acl.conf on a real server: everything works under it, and what a party has no business with is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import cluster_parts as parts
import pytest
import redis as redis_py
from cluster_parts import Cluster, Job, settle, wait_for, waiting
from fake_ranks import WAITS
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.controller.cluster.redis_keys import ACTIVE, CONTROLLERS, DISARM, GROUP, LEASE, NODES, RUNS, TERM, RunKeys
from fp8watch.controller.cluster.redis_link import connect
from fp8watch.controller.identity import KINDS

pytestmark = pytest.mark.redis
ACL = Path(__file__).resolve().parents[2] / "docs" / "redis-acl.conf"
USERS = ("agent", "controller", "console")
KEYS = RunKeys("r")


class Guarded(parts.Redis):
    """A server with the users of docs/redis-acl.conf, and one that looks at it from outside; `url` is `user`'s."""

    user = "fp8watch-agent"

    @property
    def url(self) -> str:
        return self.url_of(self.user)

    def url_of(self, user: str) -> str:
        return f"unix://{user}:pw-{user}@{self.path}"

    def client(self, user: str) -> redis_py.Redis:
        return redis_py.Redis.from_url(self.url_of(user))


def acl_file(folder: Path) -> Path:
    """As its head says that it is made: without comments, with passwords."""
    text = re.sub(r"^#.*\n", "", ACL.read_text(), flags=re.MULTILINE)
    text, number = re.subn(r"#(\w+)-PASSWORD-SHA256", lambda m: f">pw-fp8watch-{m[1].lower()}", text)
    assert number == len(USERS)
    path = folder / "users.acl"
    path.write_text(text + "\nuser outside on >pw-outside allkeys allchannels +@all\n")
    return path


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Cluster]:
    server = Guarded(tmp_path / "redis", ("--aclfile", str(acl_file(tmp_path))))
    running = Cluster(tmp_path, server, environment=dict(parts.KEYS))
    try:
        server.start()
        yield running
    finally:
        running.end()


def as_user(made: Cluster, user: str) -> None:
    assert isinstance(made.redis, Guarded)
    made.redis.user = f"fp8watch-{user}"


def test_agent_controller_and_console_need_no_more(made: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(made.redis, Guarded)
    agent = made.agent("n0")
    as_user(made, "controller")
    controller = made.controller("a")
    as_user(made, "console")
    for name, value in {**parts.KEYS, "FP8WATCH_REDIS_URL": made.redis.url, "FP8WATCH_DIR": str(made.folder)}.items():
        monkeypatch.setenv(name, value)

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(build(), list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    job = Job(made, "r", {"n0": 1}, policy=WAITS)
    store = settle(made, job)
    action = waiting(store, job)

    assert "r" in call("runs", "list")
    assert "nonfinite" in call("incident", "list")
    for undo in ((), ("--undo",)):
        assert "for the controller" in call("disarm", "r", *undo)
        assert "for the controller" in call("disarm", "--all", *undo)
    assert f"{action.id} (checkpoint_now of r): approved" in call("actions", "approve", action.id)

    def is_applied() -> bool:
        job.train(1, nan_every=0)
        return bool(job.ranks[0].applied)

    wait_for(is_applied, 25, "the action")
    as_user(made, "controller")
    successor = made.controller("b")
    assert controller.stop() == 0
    wait_for(lambda: "run r: from step" in successor.text(), 25, "a takeover")
    job.train(3, nan_every=0)
    job.end()
    wait_for(lambda: store.runs()[0].state == "ended", 25, "the end")
    wait_for(lambda: not store.link.client.smembers(ACTIVE), 25, "the run's things put away")
    as_user(made, "console")
    judged = CliRunner().invoke(build(), ["doctor", "--cluster", "--redis", made.redis.url])
    assert "not observable" not in judged.output
    assert "up to mode auto" in judged.output, "the controller lists itself"
    store.close()
    with made.redis.client("outside") as outside:
        denied = [(entry["object"], entry["username"]) for entry in outside.acl_log()]
    # Redis 7.0 has no CLIENT SETINFO to allow; clients ask for it and go on without.
    assert [entry for entry in denied if entry[0] != "client|setinfo"] == []
    for program in (agent, controller, successor):
        assert "denied" not in program.text()


REFUSED = {
    "agent": [
        ("XADD", KEYS.commands, "*", "b", "x"), ("DEL", KEYS.commands), ("HSET", KEYS.fence, "term", "9"),
        ("DEL", KEYS.fence), ("HSET", KEYS.state, "memory", "x"), ("HSET", KEYS.approvals, "a", "x"),
        ("SET", LEASE, "9:me"), ("DEL", LEASE), ("SET", TERM, "9"), ("SET", DISARM, "1"), ("SET", KEYS.frames, "x"),
        ("HSET", KEYS.kind("action"), "a", "x"), ("XREAD", "STREAMS", KEYS.frames, "0"), ("SET", ACTIVE, "x"),
        ("EVAL", "return redis.call('DEL', KEYS[1])", "1", KEYS.fence),
    ],
    "controller": [
        ("SET", KEYS.presence("n0"), "1"), ("EXPIRE", KEYS.presence("n0"), "9"), ("XADD", KEYS.frames, "*", "e", "x"),
        ("HSET", KEYS.approvals, "a", "x"), ("SET", KEYS.disarm, "1"), ("DEL", KEYS.disarm),
        ("HSET", KEYS.ranks, "0", "x"), ("HSET", NODES, "n0", "x"),
        ("EVAL", "return redis.call('HSET', ARGV[1], 'a', 'x')", "1", KEYS.fence, KEYS.approvals),
    ],
    "console": [
        ("XADD", KEYS.frames, "*", "e", "x"), ("XTRIM", KEYS.frames, "MAXLEN", "0"),
        ("XADD", KEYS.commands, "*", "b", "x"), ("HSET", KEYS.state, "memory", "x"), ("DEL", KEYS.state),
        ("HSET", KEYS.fence, "term", "9"), ("SET", LEASE, "9:me"), ("HSET", KEYS.kind("action"), "a", "x"),
        ("SET", KEYS.run, "x"), ("SET", KEYS.presence("n0"), "1"), ("HDEL", KEYS.approvals, "a"),
        ("EVAL", "return 1", "0"),
    ],
}  # fmt: skip
EVERYBODY = [
    ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", "0"), ("CONFIG", "GET", "maxmemory"), ("ACL", "LIST"),
    ("CLIENT", "LIST"), ("PUBLISH", "a", "b"), ("SCRIPT", "FLUSH"), ("REPLICAOF", "NO", "ONE"), ("SET", "other", "x"),
]  # fmt: skip
RECORDS = [kind for kind in KINDS.values() if kind not in ("run", "frame")]
NAMED = {
    "frames": KEYS.frames, "commands": KEYS.commands, "run": KEYS.run, "order": KEYS.order, "state": KEYS.state,
    "approvals": KEYS.approvals, "fence": KEYS.fence, "ranks": KEYS.ranks, "disarm": KEYS.disarm, "lease": LEASE,
    "presence": KEYS.presence("n0"), "contested": KEYS.contested("n0"), "term": TERM, "runs": RUNS, "active": ACTIVE,
    "nodes": NODES, "controllers": CONTROLLERS, "all disarmed": DISARM, **{kind: KEYS.kind(kind) for kind in RECORDS},
    **{f"{kind} order": KEYS.kind_order(kind) for kind in RECORDS},
}  # fmt: skip
WRITES: dict[str, tuple[str, ...]] = {
    "SET": ("v",), "GETSET": ("v",), "DEL": (), "UNLINK": (), "RENAME": ("other",), "RESTORE": ("0", "x"),
    "APPEND": ("v",), "INCRBY": ("1",), "EXPIRE": ("9",), "PEXPIRE": ("9",), "PERSIST": (), "HSET": ("f", "v"),
    "HDEL": ("f",), "SADD": ("m",), "SREM": ("m",), "ZADD": ("1", "m"), "ZREM": ("m",), "XADD": ("*", "f", "v"),
    "XTRIM": ("MAXLEN", "0"), "XDEL": ("1-0",), "XSETID": ("1-0",), "XACK": (GROUP, "1-0"), "LPUSH": ("v",),
    "XAUTOCLAIM": (GROUP, "c", "0", "0-0"),
}  # fmt: skip
"""What changes a key, with the arguments behind the key."""
MAY_KEEP = {"EXPIRE", "PERSIST"}
ALLOWED: dict[str, dict[str, set[str]]] = {
    "agent": {
        "frames": {"XADD", "XTRIM", "PERSIST"}, "ranks": {"HSET", "HDEL", "PERSIST"}, "presence": {"SET"},
        "active": {"SADD"}, "nodes": {"HSET"}, **{name: {"PERSIST"} for name in ("commands", "state", "fence")},
    },
    "controller": {
        "frames": {"XACK", "XAUTOCLAIM"} | MAY_KEEP, "commands": {"XADD"} | MAY_KEEP, "ranks": MAY_KEEP,
        "state": {"HSET"} | MAY_KEEP, "fence": {"HSET"} | MAY_KEEP, "run": {"SET", "UNLINK"},
        "order": {"INCRBY", "UNLINK"}, "approvals": {"UNLINK"}, "nodes": {"HDEL"}, "controllers": {"HSET", "HDEL"},
        "runs": {"SADD", "SREM"}, "active": {"SREM"}, "lease": {"SET", "DEL", "PEXPIRE"},
        "term": {"SET", "DEL", "PEXPIRE"},
        "contested": {"SET", "DEL"},
        **{kind: {"HSET", "UNLINK"} for kind in RECORDS},
        **{f"{kind} order": {"ZADD", "UNLINK"} for kind in RECORDS},
    },
    "console": {"approvals": {"HSET"}, "disarm": {"SET", "DEL"}, "all disarmed": {"SET", "DEL"}},
}  # fmt: skip
ALWAYS = {
    "ping", "hello", "select", "time", "command", "client|setname", "cluster|slots", "cluster|shards", "cluster|nodes",
    "asking",
}  # fmt: skip
READS = {"get", "smembers", "hmget", "hgetall", "hvals", "zrange", "xrange"}
COMMANDS = {
    "agent": ALWAYS | {"xadd", "xtrim", "hset", "hdel", "exists", "set", "sadd", "xread", "get", "hget", "persist"},
    "controller": ALWAYS | {
        "eval", "get", "set", "del", "pexpire", "pttl", "hmget", "hset", "xreadgroup", "xautoclaim", "xack", "xadd",
        "xgroup|create", "xgroup|delconsumer", "xinfo|groups", "xinfo|consumers", "expire", "persist", "hvals",
        "exists", "sadd", "smembers", "srem", "incrby", "zadd", "zrange", "xrange", "sscan", "sismember", "hscan",
        "hdel", "unlink",
    },
    "console": ALWAYS | READS | {"info", "hset", "set", "del"},
}  # fmt: skip
"""All that a user may say, whatever the key."""


def test_what_a_party_has_no_business_with_is_refused(made: Cluster) -> None:
    assert isinstance(made.redis, Guarded)
    for user in USERS:
        with made.redis.client(f"fp8watch-{user}") as client:
            for command in (*REFUSED[user], *EVERYBODY):
                # A script is let in where its key is, and refused at the call that it makes.
                with pytest.raises(redis_py.ResponseError, match=r"permission|can't access"):
                    client.execute_command(*command)
    nobody = connect(f"unix://{made.redis.path}")
    with pytest.raises(redis_py.AuthenticationError):
        nobody.client.ping()
    nobody.close()


def test_nobody_may_write_more_than_the_table_says(made: Cluster) -> None:
    assert isinstance(made.redis, Guarded)
    with made.redis.client("outside") as outside:
        for user in USERS:
            granted: dict[str, set[str]] = {}
            for name, key in NAMED.items():
                for command, rest in WRITES.items():
                    answer = outside.execute_command("ACL DRYRUN", f"fp8watch-{user}", command, key, *rest)
                    if answer == b"OK":
                        granted.setdefault(name, set()).add(command)
            assert granted == ALLOWED[user]
            known = outside.acl_getuser(f"fp8watch-{user}")
            assert not known["keys"], "keys only together with what may be done to them"
            assert _words(str([known["commands"], known["selectors"]])) == COMMANDS[user]
        readable = {
            name for name, key in NAMED.items()
            if b"OK" in {outside.execute_command("ACL DRYRUN", "fp8watch-agent", *c) for c in _reads(key)}
        }  # fmt: skip
        assert readable == {"commands", "contested", "nodes"}, "what is sent to it, and who has its name"


def _reads(key: str) -> list[tuple[str, ...]]:
    return [
        ("GET", key), ("HGETALL", key), ("SMEMBERS", key), ("XREAD", "STREAMS", key, "0"), ("XRANGE", key, "-", "+"),
        ("ZRANGE", key, "0", "1"), ("DUMP", key), ("HGET", key, "f"), ("SORT", key),
    ]  # fmt: skip


def _words(text: str) -> set[str]:
    return set(re.findall(r"\+([a-z|@]+)", text))
