"""Real processes fail in every way: what was promised is kept, what was lost is counted, and it goes on by itself."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import cluster_parts as parts
import hand_made as make
import pytest
from cluster_parts import NAN_EVERY, Cluster, Job, holder, wait_for

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import GROUP, RunKeys
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import ActionRecord, Command, Finding, StepFrame
from fp8watch.transport import endpoint

pytestmark = pytest.mark.redis
FAST = {"FP8WATCH_LEASE_SECONDS": "1.5"}
ALWAYS = ("--appendfsync", "always")
"""With `everysec` a server that is killed may lose what it took in its last second."""


def metrics(made: Cluster, node: str = "n0") -> dict[str, float]:
    found = next(endpoint.read_all(made.folder / node))
    return make.scrape(found.metrics_url)


def is_spooled(shown: dict[str, float], step: int) -> bool:
    """Whether an agent that finds no Redis has taken the frames up to a step."""
    return shown['fp8watch_agent_redis_up{node="n0"}'] == 0 and shown['fp8watch_step{run="r"}'] == step


def judged(store: RedisStore) -> int:
    runs = store.runs()
    return runs[0].last_step if runs else 0


def found_steps(store: RedisStore) -> list[int]:
    return [item.step for item in store.read("r", Finding) if item.detector == "nonfinite"]


def sent(store: RedisStore) -> list[Command]:
    replies = [wire.unpack_reply(fields[b"b"]) for _, fields in store.link.client.xrange(RunKeys("r").commands)]
    return [reply for reply in replies if isinstance(reply, Command)]


def until_judged(made: Cluster, job: Job) -> None:
    store = made.redis.store()
    wait_for(lambda: judged(store) >= job.step, 25, f"step {job.step} judged")
    store.close()


def multiples(last: int, first: int = 1) -> list[int]:
    return [step for step in range(NAN_EVERY, last + 1, NAN_EVERY) if step >= first]


# case: RED-02, RED-01
# case: RED-15
def test_two_nodes_two_controllers_one_is_killed_in_mid_way(tmp_path: Path) -> None:
    """The whole way: a fault is found, an action carried out by all ranks, and a standby goes on where one stopped."""
    with parts.cluster(tmp_path, environment=FAST) as made:
        for node in ("n0", "n1"):
            made.agent(node)
        programs = {name: made.controller(name) for name in ("a", "b")}
        store = made.redis.store()
        wait_for(lambda: holder(store), what="a leader")
        job = Job(made, "r", {"n0": 2, "n1": 2})
        job.train(NAN_EVERY + 15)
        until_judged(made, job)
        first = holder(store)
        programs[first].kill()
        killed = time.monotonic()
        job.train(NAN_EVERY)
        wait_for(lambda: holder(store) not in ("", first), what="a takeover")
        assert time.monotonic() - killed < 15.0
        # The second is frozen past its lease; a third takes over; what the second wakes up with is refused.
        second = holder(store)
        programs["c"] = made.controller("c")
        wait_for(lambda: "stands by" in programs["c"].text(), what="a standby")
        job.train(NAN_EVERY)
        programs[second].freeze()
        wait_for(lambda: holder(store) not in ("", second), what="a second takeover")
        programs[second].thaw()
        job.train(NAN_EVERY)
        until_judged(made, job)
        job.train(4, pause=0.2)
        assert found_steps(store) == multiples(job.step)
        commands = sent(store)
        assert len(commands) >= 2
        assert [key for key, n in Counter((c.id, c.verb) for c in commands).items() if n > 1] == []
        assert [(c.term, c.sequence) for c in commands] == sorted({(c.term, c.sequence) for c in commands})
        for rank in job.ranks:
            assert [c.id for c in rank.applied] == [c.id for c in job.ranks[0].applied]
        assert len(job.ranks[0].applied) >= 2
        assert not [item for item in store.read("r", ActionRecord) if item.status == "sent"]
        consumers = store.link.client.xinfo_consumers(RunKeys("r").frames, GROUP)
        assert first.encode() not in {item["name"] for item in consumers}, "removed once nothing of it is left"
        job.end()
        wait_for(lambda: store.runs()[0].state == "ended", what="the end")
        # Nothing of a run that is over stays for ever but what was decided.
        wait_for(lambda: 0 < store.link.client.ttl(RunKeys("r").frames) <= 600, what="the frames' end")
        assert store.link.client.ttl(RunKeys("r").kind("action")) == -1
        store.close()


# case: RED-04
# case: RED-05
# case: RED-07
def test_redis_is_restarted_with_and_without_its_data(tmp_path: Path) -> None:
    with parts.cluster(tmp_path, *ALWAYS, environment=FAST) as made:
        agent, controller = made.agent("n0"), made.controller("a")
        store = made.redis.store()
        wait_for(lambda: holder(store), what="a leader")
        job = Job(made, "r", {"n0": 2})
        job.train(30)
        until_judged(made, job)
        # Only the group is gone: nothing acts again, nothing is missed.
        store.link.client.xgroup_destroy(RunKeys("r").frames, GROUP)
        job.train(30)
        until_judged(made, job)
        assert "recreated after" in controller.text()
        # Killed with its append-only file: frames wait on disk and follow in order.
        made.redis.kill()
        job.train(50)
        wait_for(lambda: metrics(made)['fp8watch_agent_redis_up{node="n0"}'] == 0, what="redis seen to be away")
        assert metrics(made)['fp8watch_agent_spool_bytes{node="n0"}'] > 0
        made.redis.start()
        until_judged(made, job)
        shown = metrics(made)
        assert shown['fp8watch_agent_redis_up{node="n0"}'] == 1
        assert shown['fp8watch_agent_replayed_total{node="n0"}'] > 20
        assert shown['fp8watch_agent_spool_bytes{node="n0"}'] == 0
        assert not any("agent_lost_total" in name for name in shown)
        frames = [item.step for item in store.read("r", StepFrame) if item.rank == 0]
        assert frames == list(range(1, job.step + 1))
        # Killed and everything it held with it: the run is announced again, what is remembered is written again.
        before = sent(store)[-1]
        made.redis.kill()
        for path in made.redis.folder.glob("appendonlydir/*"):
            path.unlink()
        job.train(20)
        made.redis.start()
        until_judged(made, job)
        time.sleep(1.0)
        job.train(NAN_EVERY)
        until_judged(made, job)
        assert multiples(job.step)[-1] in found_steps(store)
        for _ in range(5):  # on a slow machine a command may come when its last step is over
            later = {one.id for one in sent(store) if (one.term, one.sequence) > (before.term, before.sequence)}
            if later & {command.id for command in job.ranks[0].applied}:
                break
            job.train(NAN_EVERY)
            until_judged(made, job)
        assert later & {command.id for command in job.ranks[0].applied}
        assert "has lost run r" in controller.text() + agent.text()
        assert controller.text().count("Traceback") == agent.text().count("Traceback") == 0
        store.close()


# case: RED-12
def test_redis_that_is_frozen_read_only_or_full_loses_nothing_it_need_not(tmp_path: Path) -> None:
    with parts.cluster(tmp_path, environment=FAST) as made:
        made.agent("n0")
        made.controller("a")
        store = made.redis.store()
        wait_for(lambda: holder(store), what="a leader")
        job = Job(made, "r", {"n0": 2})
        job.train(20)
        assert made.redis.process is not None
        os.kill(made.redis.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        job.train(20, pause=0.0)
        assert time.monotonic() - began < 10.0, "the agent takes frames whatever Redis does"
        os.kill(made.redis.process.pid, signal.SIGCONT)
        until_judged(made, job)
        store.link.client.replicaof("127.0.0.1", "1")
        job.train(20)
        wait_for(lambda: metrics(made).get('fp8watch_agent_redis_errors_total{node="n0",reason="read_only"}'))
        store.link.client.replicaof("NO", "ONE")
        until_judged(made, job)
        store.link.client.config_set("maxmemory", "1mb")
        job.train(20)
        wait_for(lambda: metrics(made).get('fp8watch_agent_redis_errors_total{node="n0",reason="out_of_memory"}'))
        store.link.client.config_set("maxmemory", "0")
        until_judged(made, job)
        assert found_steps(store) == multiples(job.step)
        assert not any("agent_lost_total" in name for name in metrics(made))
        store.close()


def test_an_agent_is_killed_and_started_again(tmp_path: Path) -> None:
    """Its ranks keep their frames; what waited on its disk is sent first; commands sent meanwhile are heard."""
    with parts.cluster(tmp_path, *ALWAYS, environment=FAST) as made:
        made.agent("n0")
        made.controller("a")
        store = made.redis.store()
        wait_for(lambda: holder(store), what="a leader")
        job = Job(made, "r", {"n0": 2})
        job.train(NAN_EVERY - 1)
        until_judged(made, job)
        made.redis.kill()  # so that something lies in the spool
        job.train(15)
        wait_for(lambda: is_spooled(metrics(made), job.step), what="the agent to take the frames")
        made.agents["n0"].kill()
        job.train(5)
        made.redis.start()
        made.agent("n0")
        job.train(10)
        until_judged(made, job)
        job.train(5, pause=0.1)
        frames = [item.step for item in store.read("r", StepFrame) if item.rank == 0]
        lost = set(range(1, job.step + 1)) - set(frames)
        assert len(lost) <= 2, f"what its ranks had just written to its socket: {sorted(lost)}"
        assert frames == sorted(set(frames))
        assert found_steps(store) == multiples(job.step)
        applied = [[c.id for c in rank.applied] for rank in job.ranks]
        assert applied[0] == applied[1] == [c.id for c in sent(store)]
        assert store.runs()[0].state == "running"
        # A command that went out before the agent was there is heard by a rank that comes later.
        made.agent("n0")
        for rank in job.ranks:
            rank.close()
        job.train(1)

        def is_heard_again() -> bool:
            for rank in job.ranks:
                rank.hear()
            return all(rank.repeated >= 1 for rank in job.ranks)

        wait_for(is_heard_again, what="commands heard again")
        assert [[c.id for c in rank.applied] for rank in job.ranks] == applied
        store.close()
