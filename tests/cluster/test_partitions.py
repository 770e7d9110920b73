"""A cable is pulled: agent or controller are cut off by the kernel, nobody is told, and both recover without help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cluster_parts as parts
import isolation
import pytest
from cluster_parts import NAN_EVERY, Job, holder, wait_for

from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Finding, StepFrame

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(bool(isolation.why_no_network()), reason=isolation.why_no_network() or "-"),
]


@pytest.fixture
def net() -> Iterator[isolation.Network]:
    with isolation.network() as made:
        yield made


def judged(store: RedisStore) -> int:
    return max((run.last_step for run in store.runs()), default=0)


# case: RED-15
def test_agent_and_controller_are_cut_off_from_redis_and_come_back(tmp_path: Path, net: isolation.Network) -> None:
    prefixes = {host: net.add(host) for host in ("redis", "n0", "a", "b")}
    address = net.hosts["redis"]
    redis = parts.Redis(tmp_path / "redis", ("--port", "6379", "--bind", address, "--protected-mode", "no"))
    redis.prefix, redis.public_url = prefixes["redis"], f"redis://{address}:6379/0"
    made = parts.Cluster(tmp_path, redis, environment=parts.KEYS | {"FP8WATCH_LEASE_SECONDS": "1"}, prefixes=prefixes)
    try:
        redis.start()
        agent, first = made.agent("n0"), made.controller("a")
        store = redis.store()
        wait_for(lambda: holder(store) == "a", what="a leader")
        second = made.controller("b")
        job = Job(made, "r", {"n0": 2})
        job.train(NAN_EVERY - 5)
        wait_for(lambda: judged(store) >= job.step - 1, 25, "judged steps")

        net.cut("n0")
        job.train(15)
        wait_for(lambda: "frames go to the spool" in agent.text(), what="the agent to notice")
        kept = len({frame.step for frame in store.read("r", StepFrame)})
        assert kept < job.step, "the cut is none"
        net.join("n0")
        wait_for(lambda: judged(store) >= job.step, 25, "what waited on disk")
        assert sorted({frame.step for frame in store.read("r", StepFrame)}) == list(range(1, job.step + 1))

        wait_for(lambda: "stands by" in second.text(), what="a standby")
        net.cut("a")
        wait_for(lambda: holder(store) == "b", what="the standby to take over")
        job.train(NAN_EVERY - 10)
        wait_for(lambda: judged(store) >= job.step - 1, 25, "judged steps")
        net.join("a")
        wait_for(lambda: "standing by" in first.text(), 25, "the first one's return")
        job.train(5, pause=0.1)
        wait_for(lambda: judged(store) >= job.step - 1, 25, "judged steps")
        assert holder(store) == "b"
        found = [item.step for item in store.read("r", Finding) if item.detector == "nonfinite"]
        assert found == list(range(NAN_EVERY, job.step + 1, NAN_EVERY))
        applied = [[command.id for command in rank.applied] for rank in job.ranks]
        assert applied[0] == applied[1]
        store.close()
    finally:
        made.end()
