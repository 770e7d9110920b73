"""A cluster in a box: real redis-server, agents and controllers as processes, ranks as sockets that obey commands."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_ranks import NAN_EVERY as NAN_EVERY
from fake_ranks import POLICY as POLICY
from fake_ranks import FakeRank as FakeRank
from fake_ranks import Job as Job

from fp8watch.controller.cluster.redis_keys import LEASE
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import ActionRecord

REDIS_SERVER = "/usr/bin/redis-server" if Path("/usr/bin/redis-server").exists() else "redis-server"


def wait_for(condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> Any:
    """The condition's first truthy value; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {seconds} s for {what or condition}"
        time.sleep(0.02)


@dataclass
class Redis:
    """A server on a unix socket of its own."""

    folder: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    prefix: list[str] = field(default_factory=list)
    """Of the command, e.g. another network namespace."""
    public_url: str = ""
    """Address for agents and controllers, where it is not the socket."""

    @property
    def path(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return self.public_url or f"unix://{self.path}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            *self.prefix, REDIS_SERVER, "--port", "0", "--unixsocket", str(self.path), "--dir", str(self.folder),
            "--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--loglevel", "warning", *self.arguments,
        ]  # fmt: skip
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        store = self.store()
        wait_for(lambda: _answers(store), what="redis")
        store.close()

    def kill(self) -> None:
        if self.process is not None:
            end(self.process)

    def store(self) -> RedisStore:
        return RedisStore(f"unix://{self.path}" if self.public_url else self.url)


def _answers(store: RedisStore) -> bool:
    try:
        return bool(store.link.client.ping())
    except Exception:
        return False


def end(process: subprocess.Popen[bytes], number: int = signal.SIGKILL, seconds: float = 10.0) -> int:
    """End a process that was started here, also a frozen one."""
    if process.poll() is None:
        if number != signal.SIGKILL:
            process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode


KEYS = {f"FP8WATCH_{name}_KEY": name.lower() * 10 for name in ("COMMAND", "FRAME", "APPROVAL")}


@dataclass
class Program:
    """An agent or a controller, with its log."""

    arguments: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Program:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, *self.arguments], stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
            )  # fmt: skip
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        if self.process is not None:
            end(self.process)

    def stop(self) -> int:
        assert self.process is not None
        return end(self.process, signal.SIGTERM)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def text(self) -> str:
        return self.log.read_text()


@dataclass
class Cluster:
    """What a test starts; everything is ended with it."""

    folder: Path
    redis: Redis
    agents: dict[str, Program] = field(default_factory=dict)
    controllers: list[Program] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    own: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name of an agent or controller -> more environment for it alone."""
    prefixes: dict[str, list[str]] = field(default_factory=dict)
    """Name of an agent or controller -> what its command begins with."""
    module: dict[str, list[str]] = field(default_factory=dict)
    """Name of an agent or controller -> what is run in the place of its module."""
    on_end: list[Callable[[], None]] = field(default_factory=list)

    def agent(self, node: str, *options: str) -> Program:
        """Start (again) a node's agent."""
        if (before := self.agents.get(node)) is not None:
            before.kill()
        arguments = [
            *self.module.get(node, ["-m", "fp8watch_agent"]), "--socket", str(self.socket(node)),
            "--dir", str(self.folder / node), "--metrics-port", "0", "--redis", self.redis.url, "--node", node,
            "--end-grace-seconds", "4", *options,
        ]  # fmt: skip
        self.agents[node] = program = self._start(node, arguments)
        wait_for(lambda: _accepts(self.socket(node)), what=f"agent {node}")
        return program

    def socket(self, node: str) -> Path:
        return self.folder / f"{node}.sock"

    def controller(self, name: str) -> Program:
        arguments = [
            *self.module.get(name, ["-m", "fp8watch.cli"]), "controller", "--redis", self.redis.url, "--name", name,
            "--metrics-port", "0",
        ]  # fmt: skip
        program = self._start(name, arguments)
        self.controllers.append(program)
        return program

    def _start(self, name: str, arguments: list[str]) -> Program:
        environment = self.environment | self.own.get(name, {})
        return Program(arguments, self.folder / f"{name}.log", environment, self.prefixes.get(name, [])).start()

    def end(self) -> None:
        for close in self.on_end:
            close()
        for program in (*self.controllers, *self.agents.values()):
            program.kill()
        self.redis.kill()


@contextlib.contextmanager
def cluster(folder: Path, *redis_arguments: str, environment: dict[str, str] | None = None) -> Iterator[Cluster]:
    made = Cluster(folder, Redis(folder / "redis", redis_arguments), environment=KEYS | (environment or {}))
    try:
        made.redis.start()
        yield made
    finally:
        made.end()


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def holder(store: RedisStore) -> str:
    """Name that the active controller was started with, without the suffix that makes it one of its own."""
    held = store.link.client.get(LEASE)
    return held.decode().partition(":")[2].rpartition("-")[0] if held else ""


def settle(made: Cluster, job: Job) -> RedisStore:
    """The store, once there is a leader and the job's run is being judged."""
    store = made.redis.store()
    wait_for(lambda: store.link.client.get(LEASE), what="a leader")
    job.train(5)
    wait_for(lambda: store.runs() and store.runs()[0].last_step >= 3, 25, "judged steps")
    return store


def waiting(store: RedisStore, job: Job) -> ActionRecord:
    """An action of run `r` that waits for a person: asked for by a policy such as `WAITS`, after a NaN."""
    job.train(1, nan_every=1)
    found = wait_for(
        lambda: [action for action in store.read("r", ActionRecord) if action.status == "waiting"], 25,
        "an action that waits",
    )  # fmt: skip
    assert isinstance(found[0], ActionRecord)
    return found[0]
