"""The surroundings that a fault happens to: a trainer's node, Redis and controllers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "agent"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "store"))
import cluster_parts as parts
import hand_made as make
import isolation
import redis_servers

from fp8watch.controller.cluster.redis_keys import LEASE
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.transport import endpoint

LEASE_SECONDS = "1.5"


@dataclass
class Scene:
    """Everything that was started. `made` None: one machine without a cluster."""

    folder: Path
    made: parts.Cluster | None = None
    network: isolation.Network | None = None
    clock: isolation.Clock | None = None
    disk: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the trainer."""
    result: Path = Path()

    @property
    def cluster(self) -> parts.Cluster:
        assert self.made is not None
        return self.made

    @property
    def logs(self) -> str:
        """Everything that was logged so far, by all processes."""
        paths = [*self.folder.glob("*.log"), *self.folder.glob("**/agent.log")]
        return "".join(path.read_text(errors="replace") for path in dict.fromkeys(paths))

    def scrape(self, who: str) -> dict[str, float]:
        """`agent`: the node's; else a controller's name. Raises `OSError` when it does not answer."""
        if who == "agent":
            home = self.folder / "n0" if self.made is not None else self.disk or self.folder / "home"
            live = [found.metrics_url for found in endpoint.read_all(home) if found.metrics_url]
            if not live:
                raise OSError("no endpoint")
            url, host = live[0], "agent"
        else:
            log = (self.folder / f"{who}.log").read_text()
            url, host = log.rpartition("metrics at ")[2].split()[0], who
        if self.network is None:
            return make.scrape(url)
        try:
            text = self.network.fetch(host, url)
        except subprocess.SubprocessError as error:
            raise OSError(str(error)) from error
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


class SentinelRedis(parts.Redis):
    """A master, its replica and a sentinel on loopback."""

    def start(self) -> None:
        self.master = redis_servers.Server(self.folder / "master", "--appendonly", "yes")
        follow = ("--appendonly", "yes", "--replicaof", "127.0.0.1", str(self.master.port))
        self.replica = redis_servers.Server(self.folder / "replica", *follow)
        redis_servers.until(lambda: self.replica.client.info("replication")["master_link_status"] == "up")
        self.sentinel = redis_servers.sentinel(self.folder / "sentinel", self.master)
        redis_servers.until(lambda: self.sentinel.client.sentinel_slaves("fp8"))
        self.public_url = f"redis+sentinel://127.0.0.1:{self.sentinel.port}/fp8/0"

    def store(self) -> RedisStore:
        return RedisStore(self.public_url)

    def kill(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.end()


@contextlib.contextmanager
def scene(kind: str, folder: Path) -> Iterator[Scene]:
    """A trainer's surroundings, ready; `kind`: plain, network, disk, clock, sentinel or embedded."""
    with contextlib.ExitStack() as stack:
        made = Scene(folder)
        made.result = folder / "result.json"
        made.environment = {"FP8WATCH_RUN": "r", "OMP_NUM_THREADS": "1", "FP8WATCH_QUEUE_FRAMES": "4096"}
        if kind in ("disk", "embedded"):
            made.disk = stack.enter_context(isolation.small_disk(folder / ("n0" if kind == "disk" else "home"), 24))
        made.environment["FP8WATCH_DIR"] = str(folder / "home")
        if kind != "embedded":
            _cluster(stack, kind, made)
            made.environment["FP8WATCH_AGENT"] = f"unix://{made.cluster.socket('n0')}"
        yield made


def _cluster(stack: contextlib.ExitStack, kind: str, scene: Scene) -> None:
    cluster = parts.Cluster(
        scene.folder, parts.Redis(scene.folder / "redis", ("--appendfsync", "always")),
        environment=parts.KEYS | {"FP8WATCH_LEASE_SECONDS": LEASE_SECONDS},
    )  # fmt: skip
    scene.made = cluster
    if kind == "network":
        scene.network = net = stack.enter_context(isolation.network())
        prefixes = {host: net.add(host) for host in ("redis", "agent", "a", "b")}
        cluster.redis.prefix = prefixes["redis"]
        cluster.redis.arguments += ("--port", "6379", "--bind", net.hosts["redis"], "--protected-mode", "no")
        cluster.redis.public_url = f"redis://{net.hosts['redis']}:6379/0"
        cluster.prefixes = {"n0": prefixes["agent"], "a": prefixes["a"], "b": prefixes["b"]}
    elif kind == "clock":
        scene.clock = isolation.Clock(scene.folder / "clock")
        scene.clock.set(0)
        cluster.own = {"n0": scene.clock.environment}
        cluster.module = {"n0": scene.clock.module("fp8watch_agent")}
    elif kind == "sentinel":
        cluster.redis = SentinelRedis(scene.folder / "redis")
    stack.callback(cluster.end)
    cluster.redis.start()
    cluster.agent("n0")
    cluster.controller("a")
    store = cluster.redis.store()
    parts.wait_for(lambda: store.link.client.get(LEASE), 60, "a controller")
    standby = cluster.controller("b")
    parts.wait_for(lambda: "stands by" in standby.text(), 60, "a standby")
    store.close()


def start_trainer(scene: Scene, kind: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).parent / "fault_trainer.py"), str(scene.result), "--kind", kind]
    environment: dict[str, Any] = {**os.environ, **scene.environment}
    with (scene.folder / "trainer.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)
