"""A run whose name was used before: neither what was ordered nor what was approved then counts for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cluster_parts as parts
import pytest
from cluster_parts import Job, settle, wait_for, waiting
from fake_ranks import WAITS

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import ACTIVE, LEASE, RunKeys
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import ActionRecord, Command, CommandResult, Finding

pytestmark = pytest.mark.redis
PROGRAM = Path(__file__).with_name("obedient_program.py")
HOLDS = """
version: 1
mode: auto
rules:
  - name: not-finite
    when: {detector: nonfinite, severity: act}
    ladder: [{action: hold_lr, factor: 0.01, settle_steps: 100, hold_steps: 1000}]
"""
HALTS = WAITS.replace("{action: checkpoint_now, settle_steps: 5}", "{action: halt}")


def train(made: parts.Cluster, name: str, *, steps: int, bad_step: int, is_alone: bool = False) -> tuple[str, str]:
    """A real training process, in a pod of this name: nothing is left there of earlier ones. Returns what it printed,
    and what it said."""
    policy = made.folder / "policy.yaml"
    policy.write_text(HOLDS)
    environment = {
        **os.environ, **made.environment, "FP8WATCH_DIR": str(made.folder / name), "FP8WATCH_REPORT": "0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if not is_alone:
        environment["FP8WATCH_AGENT"] = f"unix://{made.socket('n0')}"
    arguments = [sys.executable, str(PROGRAM), str(policy), str(steps), str(bad_step)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip(), done.stderr


def ordered(store: RedisStore) -> list[Command]:
    entries = store.link.client.xrange(RunKeys("nightly").commands)
    found = [wire.unpack_reply(fields[b"b"]) for _, fields in entries]
    return [reply for reply in found if isinstance(reply, Command)]


def test_a_new_run_of_a_name_obeys_nothing_that_was_ordered_for_an_earlier_one(tmp_path: Path) -> None:
    with parts.cluster(tmp_path) as made:
        made.agent("n0"), made.controller("a")
        store = made.redis.store()
        wait_for(lambda: store.link.client.get(LEASE), what="a leader")
        first, _ = train(made, "first", steps=30, bad_step=5)
        (order,) = ordered(store)
        assert (order.action, order.attempt, len(order.start)) == ("hold_lr", 0, 32)
        assert first.split()[0] == "0.0001", "the first run has obeyed"
        wait_for(lambda: not store.link.client.sismember(ACTIVE, "nightly"), 25, "the end of the first run")

        healthy, said = train(made, "second", steps=20, bad_step=0)
        assert order.last_step > 20, "the order's moment has not passed by the count of steps"
        alone, _ = train(made, "alone", steps=20, bad_step=0, is_alone=True)
        assert healthy == alone, "to the bit what it is without a controller"
        assert "hold_lr" not in said, "it has not even heard of it"
        assert [result.start for result in store.read("nightly", CommandResult)] == [order.start] * 2
        store.close()


def test_an_old_approval_does_not_count_for_another_action_that_has_its_id(tmp_path: Path) -> None:
    """By somebody who can write Redis and has no key: he keeps an approval, and empties Redis to have the id again."""
    with parts.cluster(tmp_path) as made:
        made.agent("n0")
        first = made.controller("a")
        job = Job(made, "r", {"n0": 1}, WAITS)
        store = settle(made, job)
        redis, approvals = store.link.client, RunKeys("r").approvals
        approve(made, waiting(store, job).id)
        kept = redis.hgetall(approvals)
        assert kept
        wait_for(lambda: obeyed(job, "checkpoint_now"), 25, "the approved action")
        job.end()
        wait_for(lambda: not redis.sismember(ACTIVE, "r"), 25, "the end of the first run")
        first.kill()
        redis.flushall()

        second = made.controller("b")
        job = Job(made, "r", {"n0": 1}, HALTS)
        settle(made, job).close()
        halt = waiting(store, job)
        assert (halt.action, halt.id.encode() in kept) == ("halt", True)
        redis.hset(approvals, mapping=kept)
        wait_for(lambda: "an approval or refusal is ignored" in second.text(), 25, "a refusal")
        job.train(10, nan_every=0)
        assert [action.status for action in store.read("r", ActionRecord) if action.id == halt.id] == ["waiting"]
        assert job.ranks[0].applied == []

        approve(made, halt.id)  # and the person's own word does
        wait_for(lambda: obeyed(job, "halt"), 25, "the approved action")
        store.close()


def approve(made: parts.Cluster, action_id: str) -> None:
    environment = {**os.environ, **made.environment, "FP8WATCH_REDIS_URL": made.redis.url}
    command = [sys.executable, "-m", "fp8watch.cli", "actions", "approve", action_id]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "approved, signed" in done.stdout


def obeyed(job: Job, action: str = "checkpoint_now", *, nan_every: int = 0) -> bool:
    job.train(1, pause=0.05, nan_every=nan_every)
    return action in {command.action for command in job.ranks[0].applied}


# case: RED-02
def test_an_order_reaches_its_own_start_through_another_agent_and_another_controller(tmp_path: Path) -> None:
    """Both die between the order and its delivery: the order names the start, which is the same."""
    with parts.cluster(tmp_path) as made:
        agent, controller = made.agent("n0"), made.controller("a")
        job = Job(made, "r", {"n0": 1})
        store = settle(made, job)
        made.controller("b")
        job.train(1, nan_every=1)
        wait_for(lambda: list(store.read("r", Finding)), 25, "the finding")
        agent.kill()
        controller.kill()
        made.agent("n0")
        wait_for(lambda: obeyed(job), 40, "the order")
        (rank,) = job.ranks
        assert {command.start for command in rank.applied} == {rank.start}
        assert rank.of_other_starts == []
        # The successor decides for the same start, as the stored hello names it.
        wait_for(lambda: obeyed(job, nan_every=2) and len(rank.applied) >= 2, 40, "another order")
        assert rank.applied[-1].term > rank.applied[0].term
        assert {command.start for command in rank.applied} == {rank.start}
        store.close()
