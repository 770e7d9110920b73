"""The faults of `bench/faults.py`: how each begins and ends, and what must be visible of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fault_scenes import Scene, isolation, make, parts

from fp8watch.wire import READABLE_VERSIONS, WIRE_VERSION

Act = Callable[[Scene], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`begin` and `end` act on the scene; `metric` (of `where`) and the log line `line` must be visible."""

    begin: Act
    end: Act
    scene: Literal["plain", "network", "disk", "clock", "sentinel", "embedded"] = "plain"
    where: str = "agent"
    metric: str = ""
    """Start of a sample's name; `up`: that `where` does not answer while the fault is on, like Prometheus' `up`."""
    line: str = ""
    may_lose: int = 0
    """Frames that may be lost, because docs/cluster.md does not promise to keep them."""
    repeats: int = 2
    least_seconds: float = 0.0
    """The fault is on for at least this long."""
    trainer: str = "plain"

    def why_not(self) -> str:
        """Why this machine cannot have the fault; empty when it can."""
        needs = {
            "network": isolation.why_no_network, "disk": isolation.why_no_disk, "embedded": isolation.why_no_disk,
            "clock": isolation.why_no_clock,
        }  # fmt: skip
        return needs[self.scene]() if self.scene in needs else ""


def _nothing(scene: Scene) -> None:
    pass


def _signal_redis(number: int) -> Act:
    def act(scene: Scene) -> None:
        process = scene.cluster.redis.process
        assert process is not None
        os.kill(process.pid, number)

    return act


def _asked(*command: str) -> Act:
    def act(scene: Scene) -> None:
        store = scene.cluster.redis.store()
        store.link.client.execute_command(*command)
        store.close()

    return act


def _kill_redis(scene: Scene) -> None:
    scene.cluster.redis.kill()


def _start_redis(scene: Scene) -> None:
    scene.cluster.redis.start()


def _start_empty(scene: Scene) -> None:
    for path in scene.cluster.redis.folder.glob("appendonlydir/*"):
        path.unlink()
    scene.cluster.redis.start()


def _kill_master(scene: Scene) -> None:
    scene.cluster.redis.master.process.kill()  # type: ignore[attr-defined]


def _agent(act: str) -> Act:
    def done(scene: Scene) -> None:
        getattr(scene.cluster.agents["n0"], act)()

    return done


def _agent_again(scene: Scene) -> None:
    scene.cluster.agent("n0")


def _controller(name: str, act: str) -> Act:
    def done(scene: Scene) -> None:
        getattr([c for c in scene.cluster.controllers if f"{name}.log" in str(c.log)][-1], act)()

    return done


def _controller_again(scene: Scene) -> None:
    scene.cluster.controller("a")


def _cut(*hosts: str) -> Act:
    def act(scene: Scene) -> None:
        assert scene.network is not None
        for host in hosts:
            scene.network.cut(host)

    return act


def _join(*hosts: str) -> Act:
    def act(scene: Scene) -> None:
        assert scene.network is not None
        for host in hosts:
            scene.network.join(host)

    return act


def _fill(scene: Scene) -> None:
    assert scene.disk is not None
    isolation.fill(scene.disk)


def _empty(scene: Scene) -> None:
    assert scene.disk is not None
    isolation.empty(scene.disk)


def _fill_and_kill_redis(scene: Scene) -> None:
    scene.cluster.redis.kill()
    _fill(scene)


def _empty_and_start_redis(scene: Scene) -> None:
    _empty(scene)
    scene.cluster.redis.start()


def _jump(seconds: float, *, is_agent_restarted: bool) -> Act:
    def act(scene: Scene) -> None:
        assert scene.clock is not None
        scene.clock.set(seconds)
        if is_agent_restarted:
            scene.cluster.agent("n0")

    return act


def _garbage(scene: Scene) -> None:
    for size in (4, 1000, 100_000):
        client = make.RawClient(scene.cluster.socket("n0"))
        client.send(make.hello("garbage", rank=0))
        client.socket.sendall(os.urandom(size))
        client.close()


def _speak(version: int) -> str:
    readable = sorted(READABLE_VERSIONS | {version})
    return f"from fp8watch import wire; wire.WIRE_VERSION = {version}; wire.READABLE_VERSIONS = frozenset({readable})"


def _upgrade_controllers(scene: Scene) -> None:
    """One after the other, to a version that reads the one before."""
    module = isolation.after(_speak(WIRE_VERSION + 1), "fp8watch.cli")
    for name in ("b", "a"):
        old = [c for c in scene.cluster.controllers if f"{name}.log" in str(c.log)][-1]
        old.stop()
        scene.cluster.module[name] = module
        before = old.text().count("stands by at")
        new = scene.cluster.controller(name)
        parts.wait_for(lambda new=new, before=before: new.text().count("stands by at") > before, 30, "a standby")


def _upgrade_agent(scene: Scene) -> None:
    scene.cluster.module["n0"] = isolation.after(_speak(WIRE_VERSION + 1), "fp8watch_agent")
    scene.cluster.agent("n0")
    with contextlib.suppress(AssertionError):  # whether it was refused is checked at the end
        parts.wait_for(lambda: "refused as version" in scene.logs, 20)


def _downgrade_agent(scene: Scene) -> None:
    scene.cluster.module.pop("n0")
    scene.cluster.agent("n0")


def _nan_on(scene: Scene) -> None:
    scene.result.with_suffix(".on").touch()


def _nan_off(scene: Scene) -> None:
    scene.result.with_suffix(".on").unlink()


ERRORS, SPOOLED = "fp8watch_agent_redis_errors_total", "frames go to the spool"
TAKEOVER = {"where": "b", "metric": "fp8watch_controller_takeovers_total", "line": "active under term 2"}
A_KILL = 32
"""Frames in the socket of an agent that is killed."""
FAULTS: dict[str, Fault] = {
    "none": Fault(begin=_nothing, end=_nothing),
    "redis-killed": Fault(begin=_kill_redis, end=_start_redis, metric=ERRORS, line=SPOOLED),
    "redis-restarted-empty": Fault(begin=_kill_redis, end=_start_empty, metric=ERRORS, line="has lost run",
                                   may_lose=10**6, repeats=1),
    "redis-frozen": Fault(begin=_signal_redis(signal.SIGSTOP), end=_signal_redis(signal.SIGCONT), metric=ERRORS,
                          line=SPOOLED),
    "redis-full": Fault(begin=_asked("CONFIG", "SET", "maxmemory", "1mb"),
                        end=_asked("CONFIG", "SET", "maxmemory", "0"), metric=ERRORS, line="out_of_memory"),
    "redis-read-only": Fault(begin=_asked("REPLICAOF", "127.0.0.1", "1"), end=_asked("REPLICAOF", "NO", "ONE"),
                             metric=ERRORS, line="read_only"),
    "redis-failed-over": Fault(begin=_kill_master, end=_nothing, scene="sentinel", metric=ERRORS, line=SPOOLED,
                               repeats=1),
    "agent-killed": Fault(begin=_agent("kill"), end=_agent_again, metric="up", line="forwards to redis",
                          may_lose=2 * A_KILL),
    "agent-frozen": Fault(begin=_agent("freeze"), end=_agent("thaw"), metric="up"),
    "agent-cut-off": Fault(begin=_cut("agent"), end=_join("agent"), scene="network", metric=ERRORS, line=SPOOLED),
    "agent-cut-off-long": Fault(begin=_cut("agent"), end=_join("agent"), scene="network", where="a", repeats=1,
                                metric='fp8watch_run_state{run="r",state="running"}', line="n0 is gone, so ranks",
                                least_seconds=32.0),
    "controller-killed": Fault(begin=_controller("a", "kill"), end=_controller_again, repeats=1, **TAKEOVER),  # type: ignore[arg-type]
    "controller-frozen": Fault(begin=_controller("a", "freeze"), end=_controller("a", "thaw"), repeats=1, **TAKEOVER),  # type: ignore[arg-type]
    "controller-cut-off": Fault(begin=_cut("a"), end=_join("a"), scene="network", repeats=1, **TAKEOVER),  # type: ignore[arg-type]
    "controllers-cut-off": Fault(begin=_cut("a", "b"), end=_join("a", "b"), scene="network", where="a", repeats=1,
                                 least_seconds=14.0, metric="fp8watch_controller_redis_errors_total",
                                 line="decisions are on hold"),
    "spool-disk-full": Fault(begin=_fill_and_kill_redis, end=_empty_and_start_redis, scene="disk",
                             metric="fp8watch_agent_spool_errors_total", line="holding the newest in memory"),
    "store-disk-full": Fault(begin=_fill, end=_empty, scene="embedded", metric="fp8watch_store_errors_total",
                             line="cannot be written", may_lose=10**6),
    "clock-ahead": Fault(begin=_jump(3600, is_agent_restarted=False), end=_jump(0, is_agent_restarted=False),
                         scene="clock"),
    "clock-ahead-and-back": Fault(begin=_jump(3600, is_agent_restarted=True), end=_jump(0, is_agent_restarted=True),
                                  scene="clock", line="clock was set back", may_lose=4 * A_KILL),
    "garbage-rank": Fault(begin=_garbage, end=_nothing, metric="fp8watch_frames_dropped_total",
                          line="connection of"),
    "controllers-newer": Fault(begin=_upgrade_controllers, end=_nothing, repeats=1, where="b",
                               metric='fp8watch_build_info{version="', line="forwards to redis"),
    "agent-newer": Fault(begin=_upgrade_agent, end=_downgrade_agent, repeats=1, where="a",
                         metric='fp8watch_controller_entries_refused_total{reason="version"',
                         line="refused as version", may_lose=2 * A_KILL),
    "nonfinite-10000": Fault(begin=_nan_on, end=_nan_off, trainer="nonfinite", metric="fp8watch_nonfinite_total",
                             line="act nonfinite"),
}  # fmt: skip
