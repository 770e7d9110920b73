"""Somebody can write Redis, and nothing gets done by it: no command, no frame, no approval, no memory of his counts."""

from __future__ import annotations

import time
from pathlib import Path

import cluster_parts as parts
import msgspec
import pytest
from cluster_parts import Job, settle, wait_for, waiting
from fake_ranks import WAITS

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import LEASE, RunKeys
from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import ActionRecord, Command, Finding, LedgerUpdate
from fp8watch.security import KeyRing, Signer, approvals
from fp8watch.security.envelope import Envelope, Sealer
from fp8watch.transport import endpoint

pytestmark = pytest.mark.redis
COMMANDS, FRAMES, CONSOLE = (
    KeyRing(purpose, (parts.KEYS[f"FP8WATCH_{purpose.upper()}_KEY"].encode(),))
    for purpose in ("command", "frame", "approval")
)


def command(run: str = "r") -> Command:
    return Command(
        id="forged", run=run, attempt=0, term=10**6, sequence=1, verb="apply", action="halt", last_step=10**9
    )


def send(store: RedisStore, key: str, reply: Command | LedgerUpdate) -> None:
    store.link.client.xadd(key, {"b": wire.pack(reply)})


def actions(store: RedisStore) -> list[ActionRecord]:
    return list(store.read("r", ActionRecord))


def test_forged_commands_frames_approvals_and_memory_get_nothing_done(tmp_path: Path) -> None:
    with parts.cluster(tmp_path) as made:
        agent, controller = made.agent("n0"), made.controller("a")
        job = Job(made, "r", {"n0": 1}, policy=WAITS)
        store = settle(made, job)
        redis, keys = store.link.client, RunKeys("r")
        (rank,) = job.ranks

        # Commands and labels: not signed, signed by another, altered.
        send(store, keys.commands, command())
        send(store, keys.commands, Signer(KeyRing("command", (b"x" * 40,))).command(command()))
        signed = Signer(COMMANDS).command(command("other"))
        send(store, keys.commands, msgspec.structs.replace(signed, run="r"))
        send(store, keys.commands, LedgerUpdate(run="r", checkpoint="c", label="good"))
        wait_for(lambda: agent.text().count("not signed by a controller") >= 4, what="four refusals")

        # Frames: what an agent sent, again; another body under its signature; a body of our own.
        _, fields = redis.xrange(keys.frames)[-1]
        redis.xadd(keys.frames, fields)
        genuine = msgspec.msgpack.decode(fields[b"e"], type=Envelope)
        later = msgspec.structs.replace(genuine, sequence=genuine.sequence + 10**6)
        redis.xadd(keys.frames, {**fields, b"e": msgspec.msgpack.encode(later)})
        forged = Sealer("n0", time.time_ns(), KeyRing("frame", (b"x" * 40,))).seal(genuine.body)
        redis.xadd(keys.frames, {**fields, b"e": msgspec.msgpack.encode(forged)})
        redis.xadd(keys.frames, {b"k": b"n", b"b": wire.pack(command())})
        wait_for(lambda: "refused as forged" in controller.text(), what="a refusal")
        job.train(5)
        wait_for(lambda: store.runs()[0].last_step >= 9, 25, "judged steps")
        assert list(store.read("r", Finding)) == []

        # Approvals of what waits.
        action = waiting(store, job)

        def verdict(about: ActionRecord, ring: KeyRing | None) -> Approval:
            return approvals.give(about, "approve", by="somebody", time_unix=time.time(), ring=ring)

        store.approve(verdict(action, None))
        job.train(3)
        wait_for(lambda: "not signed by a command line" in controller.text(), what="a refusal")
        store.approve(verdict(action, COMMANDS))
        wait_for(lambda: controller.text().count("not signed by a command line") >= 2, what="a second refusal")
        time.sleep(1.2)  # looked at again and again while the action waits, and said once
        assert controller.text().count("not signed by a command line") == 2
        assert actions(store)[0].status == "waiting"
        assert rank.applied == []

        # The memory that a successor would take over: his own is not used.
        controller.kill()
        for name in ("memory", "last_id", "numbers", "nodes"):
            body = redis.hget(keys.state, name)
            redis.hset(keys.state, name, body[:-1] + bytes([body[-1] ^ 1]))
        successor = made.controller("b")
        wait_for(lambda: "is not signed by a controller" in successor.text(), 25, "a refusal")

        # And what is genuine still works.
        wait_for(lambda: store.link.client.get(LEASE), what="a leader")

        def is_applied() -> bool:
            job.train(2, nan_every=2)
            for action in actions(store):
                store.approve(verdict(action, CONSOLE))
            return bool(rank.applied)

        wait_for(is_applied, 25, "the action")
        assert {c.action for c in rank.applied} == {"checkpoint_now"}
        store.close()


def test_without_keys_nothing_acts_and_it_is_said(tmp_path: Path) -> None:
    unset = dict.fromkeys(parts.KEYS, "")
    with parts.cluster(tmp_path, environment=unset) as made:
        agent, controller = made.agent("n0"), made.controller("a")
        job = Job(made, "r", {"n0": 1})
        store = settle(made, job)
        job.train(2, nan_every=1)
        wait_for(lambda: list(store.read("r", Finding)), 25, "the finding")
        send(store, RunKeys("r").commands, command())
        wait_for(lambda: "not signed by a controller" in agent.text(), what="a refusal")
        job.train(3)
        assert "only observes" in controller.text()
        assert {action.status for action in actions(store)} <= {"proposed"}
        assert job.ranks[0].applied == []
        place = endpoint.read(made.folder / "n0", "r")
        assert place is not None
        assert (place.store, place.redis) == ("", store.link.shown), "the node's folder says where the records are"
        store.close()
