"""Real Redis servers for tests: alone, as a cluster of one node, and as master and replica under a sentinel."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis
from free_ports import free_port

REDIS_KINDS = ("redis", "redis-cluster")
SERVER = "/usr/bin/redis-server" if Path("/usr/bin/redis-server").exists() else "redis-server"


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.05)


class Server:
    """One redis-server on a loopback port."""

    def __init__(self, folder: Path, *arguments: str, port: int | None = None) -> None:
        self.port = port or free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        command = [
            SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
            "--loglevel", "warning", *arguments,
        ]  # fmt: skip
        if arguments[:1] and arguments[0].endswith(".conf"):
            command = [SERVER, *arguments]
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.client = redis.Redis(port=self.port, socket_timeout=2)
        until(self.client.ping)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def end(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


def cluster_of_one(folder: Path) -> Server:
    """A Redis Cluster whose one node holds all slots: multi-key calls across slots are refused as in a large one."""
    server = Server(folder, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    until(lambda: b"cluster_state:ok" in _raw(server))
    return server


def _raw(server: Server) -> bytes:
    answer = server.client.execute_command("CLUSTER", "INFO")
    if isinstance(answer, dict):
        return "\n".join(f"{key}:{value}" for key, value in answer.items()).encode()
    return answer if isinstance(answer, bytes) else str(answer).encode()


def sentinel(folder: Path, master: Server) -> Server:
    """A sentinel that fails over after one second."""
    port = free_port()
    folder.mkdir(parents=True)
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor fp8 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds fp8 1000\nsentinel failover-timeout fp8 3000\n"
    )
    return Server(folder, str(config), "--sentinel", port=port)
