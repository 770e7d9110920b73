"""A standing agent: several runs and ranks, strangers and garbage on its socket, a clean end."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hand_made as make
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8watch import wire
from fp8watch.records import Welcome
from fp8watch.transport import endpoint


@dataclass
class _Agent:
    process: subprocess.Popen[bytes]
    socket: Path
    home: Path
    url: str = ""

    def metric(self, name: str) -> float:
        return make.scrape(self.url).get(name, 0.0)


def _connected(socket: Path) -> make.RawClient | None:
    """None: it is not there, or not listened to yet."""
    try:
        return make.RawClient(socket)
    except OSError:
        return None


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Agent]:
    folder = tmp_path_factory.mktemp("standing")
    socket, home = folder / "agent.sock", folder / "home"
    command = [
        sys.executable, "-m", "fp8watch_agent", "--socket", str(socket), "--dir", str(home), "--metrics-port", "0",
        "--end-grace-seconds", "4",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    agent = _Agent(process, socket, home)
    try:
        client = make.wait_for(lambda: _connected(socket), what="the agent to listen")
        client.send(make.hello("first"))
        welcome = client.receive()
        assert isinstance(welcome, Welcome)
        agent.url = welcome.metrics_url
        yield agent
        # Told to go with a rank still connected: leaves cleanly.
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert client.is_closed_by_peer()
        client.close()
        assert not socket.exists()
        found = endpoint.read(home, "first")
        assert found is not None
        assert found.state == "ended"
        assert "Traceback" not in (folder / "log").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _is_alive(agent: _Agent) -> bool:
    """Whether a new rank is welcomed."""
    client = make.RawClient(agent.socket)
    client.send(make.hello("probe"), make.goodbye("probe"))
    reply = client.receive()
    client.close()
    return isinstance(reply, Welcome)


@given(data=st.binary(max_size=400), is_framed=st.booleans(), comes_after_hello=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_end_the_server(agent: _Agent, data: bytes, is_framed: bool, comes_after_hello: bool) -> None:
    client = make.RawClient(agent.socket)
    if comes_after_hello:
        client.send(make.hello("garbage"))
    client.socket.sendall(struct.pack(">I", len(data)) + data if is_framed else data)
    client.close()
    assert agent.process.poll() is None


def test_the_server_serves_after_garbage(agent: _Agent) -> None:
    assert _is_alive(agent)


def test_malformed_foreign_and_oversized_messages_are_counted(agent: _Agent) -> None:
    def dropped(reason: str) -> float:
        return agent.metric(f'fp8watch_frames_dropped_total{{reason="{reason}",run="counted"}}')

    client = make.RawClient(agent.socket)
    client.send(make.hello("counted"), make.layout("counted"))
    client.receive()
    client.socket.sendall(struct.pack(">I", 5) + b"\xc1abcd")
    client.send(make.frame("another", 1), make.frame("counted", 1, rank=7), make.frame("counted", 1, 5, amax=1.0))
    client.send(make.frame("counted", 2, 6, amax=1.0))
    make.wait_for(lambda: agent.metric('fp8watch_step{run="counted"}') == 2)
    assert dropped("malformed") == 2  # one that cannot be decoded, one whose column does not fit
    assert dropped("foreign") == 2
    client.socket.sendall(struct.pack(">I", wire.MAX_MESSAGE_BYTES + 1))
    assert client.is_closed_by_peer()
    client.close()
    make.wait_for(lambda: dropped("too_large") == 1)


@pytest.mark.parametrize("version", [0, wire.WIRE_VERSION + 1])
def test_a_rank_of_another_wire_version_is_told_so_and_may_come_back(agent: _Agent, version: int) -> None:
    client = make.RawClient(agent.socket)
    client.send(make.hello("upgraded", wire_version=version))
    answer = client.receive()
    assert isinstance(answer, Welcome)
    assert f"speaks wire version {version}" in answer.warnings[0]
    assert client.is_closed_by_peer()
    client.close()
    make.wait_for(lambda: agent.metric('fp8watch_frames_dropped_total{reason="version",run="upgraded"}') >= 1)
    client = make.RawClient(agent.socket)
    client.send(make.hello("upgraded"), make.goodbye("upgraded"))
    answer = client.receive()
    assert isinstance(answer, Welcome)
    assert answer.warnings == []
    client.close()


def test_without_a_hello_nothing_is_taken(agent: _Agent) -> None:
    client = make.RawClient(agent.socket)
    client.send(make.frame("unknown", 1))
    make.wait_for(lambda: agent.metric('fp8watch_frames_dropped_total{reason="foreign",run=""}') >= 1)
    assert agent.metric('fp8watch_steps_total{run="unknown"}') == 0
    client.close()


def test_ranks_share_a_run_and_one_may_come_back(agent: _Agent) -> None:
    ranks = [make.RawClient(agent.socket) for _ in range(3)]
    for rank, client in enumerate(ranks):
        client.send(make.hello("shared", rank=rank, world_size=3), make.layout("shared", rank=rank))
        assert isinstance(client.receive(), Welcome)
        client.send(make.frame("shared", 1, 6, rank=rank, amax=1.0 + rank, scale=1.0))
    name = 'fp8watch_tensor_amax{block="0",layer="",run="shared",tensor="input"}'
    make.wait_for(lambda: agent.metric(name) == 3.0)
    # Rank 1 is back before the agent has seen the end of its first connection.
    again = make.RawClient(agent.socket)
    again.send(make.hello("shared", rank=1, world_size=3))
    assert isinstance(again.receive(), Welcome)
    assert ranks[1].is_closed_by_peer()
    again.close()
    again = make.RawClient(agent.socket)
    again.send(make.hello("shared", rank=1, world_size=3))
    assert isinstance(again.receive(), Welcome)
    # Rank 2 is gone for good: after the grace time its values no longer count, the run goes on.
    ranks[2].close()
    make.wait_for(lambda: agent.metric(name) == 2.0)
    assert agent.metric('fp8watch_run_state{run="shared",state="running"}') == 1
    for client in (ranks[0], again):
        client.send(make.goodbye("shared", rank=0 if client is ranks[0] else 1))
        client.close()
    make.wait_for(lambda: agent.metric('fp8watch_run_state{run="shared",state="ended"}') == 1)
    ranks[1].close()
    # The goodbyes ended the run; its endpoint follows when the last connection is closed.
    make.wait_for(lambda: (found := endpoint.read(agent.home, "shared")) is not None and found.state == "ended")


def test_two_processes_cannot_be_the_same_rank(agent: _Agent) -> None:
    first = make.RawClient(agent.socket)
    first.send(make.hello("twice", pid=1001))
    assert isinstance(first.receive(), Welcome)
    second = make.RawClient(agent.socket)
    second.send(make.hello("twice", pid=1002), make.frame("twice", 77))
    reply = second.receive()
    assert isinstance(reply, Welcome)
    assert "process 1001 already trains as rank 0 of run twice" in reply.warnings[0]
    assert second.is_closed_by_peer()
    second.close()
    first.send(make.frame("twice", 1), make.goodbye("twice"))
    make.wait_for(lambda: agent.metric('fp8watch_step{run="twice"}') == 1)
    first.close()


def test_a_second_agent_does_not_take_the_socket(agent: _Agent) -> None:
    command = [sys.executable, "-m", "fp8watch_agent", "--socket", str(agent.socket), "--metrics-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "another agent serves" in done.stderr
    assert _is_alive(agent)
