"""Agent, controller and command line over TLS alone: found, approved by a person, applied by the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cluster_parts as parts
import pytest
import tls_servers
from cluster_parts import Job, settle, wait_for, waiting
from fake_ranks import WAITS

from fp8watch.controller.stores.redis import RedisStore

pytestmark = pytest.mark.redis


class TlsRedis(parts.Redis):
    """Answers nobody who has no certificate of ours."""

    def start(self) -> None:
        self.folder.mkdir()
        tls_servers.make_certificates(self.folder)
        self.server = tls_servers.TlsServer(self.folder, "server", asks_clients=True)
        self.public_url = self.server.address(
            ssl_ca_certs="ours.crt", ssl_certfile="agent.crt", ssl_keyfile="agent.key"
        )

    def store(self) -> RedisStore:
        return RedisStore(self.public_url)

    def kill(self) -> None:
        self.server.end()


def console(made: parts.Cluster, *arguments: str) -> str:
    """The command line of whoever holds the console's key and nothing else."""
    keys = {name: value for name, value in parts.KEYS.items() if "APPROVAL" in name}
    environment = {**os.environ, **keys, "FP8WATCH_REDIS_URL": made.redis.url, "FP8WATCH_DIR": str(made.folder / "c")}
    command = [sys.executable, "-m", "fp8watch.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_fault_is_found_approved_and_acted_on_over_tls(tmp_path: Path) -> None:
    if problem := tls_servers.why_not():
        pytest.skip(problem)
    made = parts.Cluster(tmp_path, TlsRedis(tmp_path / "redis"), environment=dict(parts.KEYS))
    made.redis.start()
    try:
        agent, controller = made.agent("n0"), made.controller("a")
        assert made.redis.url.startswith("rediss://")
        job = Job(made, "r", {"n0": 1}, policy=WAITS)
        store = settle(made, job)
        action = waiting(store, job)
        assert action.id in {item["id"] for item in json.loads(console(made, "actions", "list", "--json"))}
        assert "approved" in console(made, "actions", "approve", action.id)

        def is_applied() -> bool:
            job.train(1, pause=0.05)
            return bool(job.ranks[0].applied)

        wait_for(is_applied, 25, "the action")
        assert job.ranks[0].applied[0].id == action.id
        store.close()
    finally:
        made.end()
    for text in (agent.text(), controller.text()):
        assert "Traceback" not in text
        assert ".key" not in text, "nothing of the address but where it leads"
