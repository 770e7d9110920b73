"""An agent, or whoever can write where agents do, sends what no agent sends: the controller goes on for all others."""

from __future__ import annotations

import time
from pathlib import Path

import cluster_parts as parts
import hand_made as make
import msgspec
import pytest
from cluster_parts import POLICY, wait_for

from fp8watch.controller.cluster.inflow import Entered
from fp8watch.controller.cluster.node_merge import NodeMerger
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.redis_keys import ACTIVE, LEASE, RUNS, RunKeys
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import NodeFrame, RankLost, Uplink

DEEP = b"\x81\xa1?" + b"\x91" * 5000
"""A map whose one field nobody knows and that is nested deeper than any recursion limit."""


def node_frame(step: int, ranks: list[int], node: str = "a") -> NodeFrame:
    scalars = [{"loss": 2.0, "grad_norm": 1.0} for _ in ranks]
    return NodeFrame(
        run="r", attempt=0, node=node, rank=min(ranks, default=0), step=step, layout_id=1, time_unix=float(step),
        ranks=ranks, scalars=scalars,
    )  # fmt: skip


@pytest.mark.redis
@pytest.mark.parametrize("end", [RankLost(run="r", rank=0, node="a"), make.goodbye("r", 4)], ids=["lost", "goodbye"])
def test_only_the_node_that_holds_a_rank_can_lose_it(store: RedisStore, end: Uplink) -> None:
    program = ClusterProgram(store.link, holder="c")
    program._round()
    program._join("r")
    hello = make.hello("r", policy=POLICY)
    program._take([Entered("r", "1-0", hello, "a"), Entered("r", "2-0", make.layout("r"), "a")])
    program.runs.lost("r", 0)  # node a has fallen silent
    # The rank goes on at node b, and what node a has to say of it comes late (or is another's doing).
    program._take([Entered("r", "3-0", hello, "b"), Entered("r", "4-0", end, "a")])
    record = program.runs.state("r")
    assert record is not None
    assert record.state == "running"
    assert program.runs.pilot("r").ranks  # type: ignore[union-attr]
    assert program.inflow.refused["r", "other_node"] == 1
    of_b = RankLost(run="r", rank=0, node="b") if isinstance(end, RankLost) else end
    program._take([Entered("r", "5-0", of_b, "b")])
    assert not program.runs.pilot("r").ranks  # type: ignore[union-attr]
    assert program.inflow.refused["r", "other_node"] == 1


@pytest.mark.redis
def test_an_entry_a_verdict_and_a_run_that_cannot_be_read_end_no_controller(tmp_path: Path) -> None:
    with parts.cluster(tmp_path) as made:
        made.agent("n0")
        controller = made.controller("a")
        job = parts.Job(made, "r", {"n0": 1})
        store = made.redis.store()
        wait_for(lambda: store.link.client.get(LEASE), what="a leader")
        job.train(5)
        wait_for(lambda: store.runs() and store.runs()[0].last_step >= 3, 25, "judged steps")
        redis, keys = store.link.client, RunKeys("r")
        redis.xadd(keys.frames, {"k": "n", "e": DEEP})
        redis.hset(keys.approvals, "a", DEEP)
        redis.sadd(ACTIVE, b"\xff")
        redis.sadd(RUNS, b"\xff")
        wait_for(lambda: "refused as malformed" in controller.text(), what="a refusal")
        time.sleep(1.1)  # the next look at runs and verdicts
        job.train(10)
        wait_for(lambda: store.runs()[0].last_step >= 13, 25, "judged steps")
        assert store.approvals("r") == []
        assert controller.process is not None
        assert controller.process.poll() is None
        store.close()


def test_a_frame_of_a_rank_is_nothing_an_agent_sends() -> None:
    controller = ClusterController(MemoryStore(), clock=lambda: 1000.0)
    for rank in range(2):
        controller.take(make.hello("r", rank=rank, world_size=2))
    controller.take(make.frame("r", 1, 6, rank=1))
    controller.take(make.goodbye("r", rank=0))
    assert controller.ignored["frame of a rank"] == 1
    controller.take(node_frame(1, [1]))
    pilot = controller.pilot("r")
    assert pilot is not None
    assert pilot.closed == (0, 1)


def test_frames_without_ranks_and_repeated_ones_take_no_memory() -> None:
    merger = NodeMerger(1)
    for step in range(1, 200):
        merger.node(node_frame(step + 10**6, []))
        assert len(merger.node(node_frame(step, [0]))) == 1
        merger.node(node_frame(step, [0]))
    assert msgspec.to_builtins(merger._nodes) == {}
