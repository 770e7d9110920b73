"""Of a cluster's run, too, the decision log is written again to the byte: nodes' frames over a real Redis, a rollback,
a restart, lost frames, a person's approval, disarming, and controllers that die and are followed by others."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from live_run import POLICY, TENSORS
from redis_server import Server, running
from typer.testing import CliRunner

from fp8watch import columns, wire
from fp8watch.cli import build
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import ACTIVE, LEASE, RunKeys
from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import (
    ACTIONS,
    ActionRecord,
    Arrival,
    CheckpointRecord,
    Command,
    CommandResult,
    Finding,
    Goodbye,
    Hello,
    Layout,
    NodeFrame,
    RankLost,
    StepFrame,
    TraceEntry,
    Uplink,
)
from fp8watch.replay.reenact import Reenactment
from fp8watch.replay.run import replay
from fp8watch.security.envelope import Sealer

pytestmark = pytest.mark.redis
NODES = ("a", "b")
INTRUDER = "c"
KEYS = RunKeys("r")


class ClusterRun:
    """Two nodes of a rank each that obey, and the controllers that decide for them one after the other."""

    def __init__(self, store: RedisStore) -> None:
        self.store, self.redis = store, store.link.client
        self.sealers = {node: Sealer(node, 1, None) for node in (*NODES, INTRUDER)}
        self.step = self.attempt = 0
        self.pid, self.now, self.scale = 100, 1_000_000.0, 56.0
        self.is_broken = False
        self.dies_at = 0
        self.heard = "-"
        self.drop: set[tuple[int, int, str]] = set()
        self.redis.sadd(ACTIVE, "r")
        self.new_controller("first")
        self.hello()

    def new_controller(self, name: str, *, keeps_memory: bool = True) -> None:
        """The last one dies without a word; another comes once its lease is over, which is now."""
        if name != "first":
            self.redis.delete(LEASE)
            if not keeps_memory:
                self.redis.hdel(KEYS.state, "memory")
        self.program = program = ClusterProgram(self.store.link, holder=name, lease_seconds=60.0)
        read = program.inflow.read
        program.inflow.read = lambda block_ms=1: read(block_ms)  # type: ignore[method-assign]
        self.rounds()

    def rounds(self) -> None:
        """Until all that was sent is dealt with."""
        last = self.redis.xrevrange(KEYS.frames, count=1)
        for _ in range(200):
            self.program._round()
            if not last or self.program.inflow.last_id("r") == last[0][0].decode():
                return
        raise AssertionError("the controller does not get through")

    def look(self) -> None:
        """At once for people's verdicts and disarming."""
        self.program._looked_at = self.program.runs._looked_at = 0.0
        self.rounds()

    def put(self, node: str, message: Uplink) -> None:
        entry = msgspec.msgpack.encode(self.sealers[node].seal(wire.pack(message)))
        self.redis.xadd(KEYS.frames, {"k": "n" if isinstance(message, NodeFrame) else "m", "e": entry})

    def hello(self) -> None:
        for rank, node in enumerate(NODES):
            self.redis.set(KEYS.presence(node), "1")
            self.now += 0.01
            hello = Hello(
                wire_version=wire.WIRE_VERSION, run="r", attempt=self.attempt, rank=rank, local_rank=0, world_size=2,
                pid=self.pid + rank, host=node, time_unix=self.now, step=self.step, policy=POLICY, policy_name="test",
                capabilities=dict.fromkeys(ACTIONS, ""), warmup_steps=10,
            )  # fmt: skip
            layout = Layout(
                run="r", attempt=self.attempt, rank=rank, layout_id=1, columns=TENSORS, expected_modules=4,
                observed_modules=4,
            )  # fmt: skip
            self.redis.hset(KEYS.ranks, str(rank), msgspec.msgpack.encode(Sealer(node, 1, None).seal(wire.pack(hello))))
            self.put(node, hello)
            self.put(node, layout)

    def intrude(self) -> None:
        """Another run of that name on another node, some steps ahead."""
        hello = Hello(
            wire_version=wire.WIRE_VERSION, run="r", attempt=self.attempt, rank=0, local_rank=0, world_size=1, pid=7,
            host=INTRUDER, time_unix=self.now, step=self.step, policy=None,
        )  # fmt: skip
        self.put(INTRUDER, hello)
        for step in range(self.step + 1, self.step + 5):
            frame = NodeFrame(
                run="r", attempt=self.attempt, node=INTRUDER, rank=0, step=step, layout_id=1, time_unix=self.now,
                ranks=[0], scalars=[{"loss": math.nan, "grad_norm": math.nan}],
            )  # fmt: skip
            self.put(INTRUDER, frame)

    def train(self, until: int, *, every: int = 5) -> None:
        for _ in range(1000):
            if self.step >= until:
                break
            self.obey()
            self.step += 1
            self.one_step()
            if self.step == self.dies_at:
                self.new_controller("second")
            if self.step % every == 0 or self.step == until:
                self.rounds()
        self.rounds()

    def one_step(self) -> None:
        if self.attempt == 0 and self.step == 95:
            self.is_broken = True
        if self.attempt == 1 and self.step == 120:
            self.scale *= 64
        burst = self.attempt >= 2 and 240 <= self.step < 260 and self.step % 2 == 0
        for rank, node in enumerate(NODES):
            self.now += 0.05
            scalars = {
                "loss": 2.0 + 0.01 * math.sin(self.step), "grad_norm": 60.0 if burst else 1.0, "learning_rate": 1e-3,
                "lr_factor": 1.0, "update_rms": 1e-4, "tokens": 512.0, "clip_limit": 10.0,
            }  # fmt: skip
            if self.is_broken:
                scalars |= {"loss": math.nan, "grad_norm": math.nan, "param_nonfinite": 1.0}
            amax = np.full(len(TENSORS), 8.0 + 0.001 * math.sin(self.step + rank), np.float32)
            held = {"amax": amax, "scale": np.full(len(TENSORS), self.scale, np.float32)}
            frame = NodeFrame(
                run="r", attempt=self.attempt, node=node, rank=rank, step=self.step, layout_id=1, time_unix=self.now,
                ranks=[rank], scalars=[scalars],
                columns={name: columns.pack(values, "f4") for name, values in held.items()},
            )  # fmt: skip
            if (self.attempt, self.step, node) not in self.drop:
                self.put(node, frame)
        if self.step % 10 == 0 and not self.is_broken:
            self.put("a", CheckpointRecord(
                run="r", attempt=self.attempt, checkpoint=f"a{self.attempt}-s{self.step}", step=self.step,
                path=f"/c/{self.step}", label="candidate", has_data_position=True, time_unix=self.now,
            ))  # fmt: skip

    def obey(self) -> None:
        entries = self.redis.xrange(KEYS.commands, min=self.heard)
        for entry_id, fields in entries:
            self.heard = f"({entry_id.decode()}"
            reply = wire.unpack_reply(fields[b"b"])
            if isinstance(reply, Command):
                self.carry_out(reply)

    def carry_out(self, command: Command) -> None:
        at, replayed = self.step, 0
        if command.action == "rollback":
            at = command.params["checkpoint_step"]
            replayed, self.step, self.is_broken = self.step - at, at, False
            self.attempt += 1
            self.hello()
        if command.action == "repair_scale":
            self.scale = 56.0
        for rank, node in enumerate(NODES):
            self.put(node, CommandResult(
                id=command.id, run="r", attempt=self.attempt, rank=rank, verb=command.verb, step=at, status="applied",
                readback="ok", steps_replayed=replayed, observed={"rank": rank},
            ))  # fmt: skip

    def restart_training(self, at: int) -> None:
        for rank, node in enumerate(NODES):
            self.put(node, RankLost(run="r", rank=rank, node=node))
        self.step, self.attempt, self.pid = at, self.attempt + 1, self.pid + 50
        self.hello()


def record(store: RedisStore) -> None:
    run = ClusterRun(store)
    run.drop = {(0, 60, "b"), (1, 118, "a"), (1, 118, "b"), (2, 170, "a")}
    run.train(60)
    run.dies_at = 63  # in the middle of what it has read and not committed
    run.train(130)  # breaks at 95, is rolled back, scales go wrong at 120 and are repaired
    run.new_controller("third", keeps_memory=False)
    run.intrude()
    run.train(160)
    run.restart_training(150)
    run.intrude()
    run.train(260)
    (waiting, *_) = [item for item in store.read("r", ActionRecord) if item.status == "waiting"]
    store.approve(Approval(run="r", action_id=waiting.id, verdict="approve", by="mara", time_unix=1.0))
    run.look()
    run.train(275)
    run.redis.set(KEYS.disarm, "1")
    run.look()
    run.train(285)
    run.redis.delete(KEYS.disarm)
    run.look()
    run.train(330)
    for rank, node in enumerate(NODES):
        run.put(node, Goodbye(run="r", rank=rank, step=run.step))
    run.rounds()
    run.program._commit("r")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as made:
        store = RedisStore(made.url)
        record(store)
        store.close()
        yield made


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    opened = RedisStore(server.url)
    yield opened
    opened.close()


def reenacted(store: RedisStore) -> tuple[list[bytes], list[Finding]]:
    trace: list[bytes] = []
    findings: list[Finding] = []
    for seen in Reenactment(store, "r").steps():
        trace += [wire.pack(entry) for entry in seen.trace]
        findings += seen.findings
    return trace, findings


def test_the_run_has_everything_in_it(store: RedisStore) -> None:
    kinds = {item.kind for item in store.read("r", Arrival)}
    assert {"opened", "taken_over", "layouts", "hello", "result", "lost", "disarmed", "approval", "goodbye"} <= kinds
    done = [item.action for item in store.read("r", ActionRecord) if item.readback == "ok"]
    assert {"rollback", "repair_scale", "tighten_clip"} <= set(done)
    assert {entry.attempt for entry in store.read("r", TraceEntry)} == {0, 1, 2}


def test_what_a_node_sends_that_does_not_hold_the_run_is_in_nothing(store: RedisStore) -> None:
    senders = {frame.node for _, frame in store.node_frames("r")}
    assert senders == set(NODES)
    lost = [frame.step for frame in store.read("r", StepFrame) if math.isnan(frame.scalars["loss"])]
    assert lost
    assert max(lost) < 130, "none of the intruder's, which came first"


def test_live_and_replayed_decision_logs_are_equal_to_the_byte(store: RedisStore) -> None:
    live = [wire.pack(entry) for entry in store.read("r", TraceEntry)]
    trace, findings = reenacted(store)
    assert len(live) > 20
    assert trace == live
    assert findings == list(store.read("r", Finding))


def test_replay_reads_a_clusters_run_where_it_lies(server: Server, store: RedisStore, tmp_path: Path) -> None:
    done = CliRunner().invoke(build(), ["replay", server.url, "--run", "r", "--decisions", "--format", "jsonl"])
    assert done.exit_code == 0, done.output
    expected = [msgspec.json.encode(entry).decode() for entry in store.read("r", TraceEntry)]
    assert done.stdout.splitlines() == expected
    policy = tmp_path / "p.yaml"
    policy.write_text(POLICY)
    own = CliRunner().invoke(build(), ["replay", server.url, "--policy", str(policy), "--format", "jsonl"])
    cost = json.loads(own.stdout.splitlines()[-1])["summary"]
    assert (cost["assumed"], cost["rollbacks"]) == ("nothing: as it was", 1)
    missing = CliRunner().invoke(build(), ["replay", server.url, "--run", "s"])
    assert missing.exit_code == 2
    assert "no run 's'; there are: r" in missing.output


def test_an_incident_of_a_cluster_can_be_exported_and_replayed(
    server: Server, store: RedisStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8WATCH_REDIS_URL", server.url)
    finding = next(item for item in store.read("r", Finding) if item.detector == "scale_frozen")
    path = tmp_path / "b.zip"
    arguments = ["incident", "export", finding.incident, "-o", str(path), "--dir", str(tmp_path), "--json"]
    done = CliRunner().invoke(build(), arguments)
    assert done.exit_code == 0, done.output
    manifest: dict[str, Any] = json.loads(done.stdout)
    assert manifest["frames"] > 100
    assert manifest["reproduces"] is True
    out = io.StringIO()
    assert replay([path], out=out, err=io.StringIO()) == 0
    assert finding.incident in {json.loads(line)["incident"] for line in out.getvalue().splitlines()}


def test_what_was_not_told_in_order_is_found_out(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without the order, or without a node's frame, the logs differ. Last, for it changes the
    stream."""
    live = [wire.pack(entry) for entry in store.read("r", TraceEntry)]
    with monkeypatch.context() as patched:
        patched.setattr("fp8watch.replay.reenact.entry_number", lambda entry_id: (len(entry_id) > 0, 0))
        assert reenacted(store)[0] != live
    frames = [entry for entry, frame in store.node_frames("r") if (frame.attempt, frame.step) == (0, 95)]
    assert len(frames) == 2
    store.link.client.xdel(KEYS.frames, *frames)
    assert reenacted(store)[0] != live
