"""Users of a node's agent: who may connect, and that a run is its beginner's. Real sockets, real users (as root)."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hand_made import hello

from fp8watch import wire
from fp8watch.records import Welcome
from fp8watch_agent import server
from fp8watch_agent.lifecycle import Lifecycle
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.peers import EVERYBODY, Owners, Peer, peer_of

ME = Peer(1, 1000, 1000)
OTHER = Peer(2, 1001, 1001)
ROOT = Peer(3, 0, 0)

AS_USER = """
import os, socket, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
connection = socket.socket(socket.AF_UNIX); connection.settimeout(5.0)
try:
    connection.connect(sys.argv[2])
except PermissionError:
    sys.exit("no permission")
connection.sendall(bytes.fromhex(sys.argv[3]))
answer = connection.recv(65536)
sys.stdout.write(answer.hex())
if "stay" in sys.argv:
    sys.stdout.flush(); sys.stdin.read()
"""


def test_the_kernel_names_the_peer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = peer_of(ours)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())


def test_by_default_our_user_and_root() -> None:
    owners = Owners(any_user=False, own_uid=ME.uid)
    assert [owners.may_connect(peer) for peer in (ME, ROOT, OTHER)] == [True, True, False]


def test_a_run_is_its_beginners_until_it_is_over() -> None:
    owners = Owners(any_user=True, own_uid=0)
    assert owners.may_connect(OTHER)
    assert owners.claim("r", ME)
    assert not owners.claim("r", OTHER)
    assert owners.claim("r", ROOT)
    assert owners.claim("other", OTHER)
    owners.release("r")
    assert owners.claim("r", OTHER)


class Silent:
    """A session that answers nothing."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.heard: list[object] = []

    def receive(self, message):
        self.heard.append(message)
        return [wire_welcome(self.run)]

    def lost(self, rank):
        return []

    tick = backlog = lambda self: []

    def take(self, reply):
        return []

    def news(self):
        return None

    def questions(self):
        return None

    def close(self):
        pass


def wire_welcome(run: str) -> Welcome:
    return Welcome(wire_version=wire.WIRE_VERSION, run=run, term=7)


def ask(uid: int, path: Path, rank: int, *more: str) -> subprocess.Popen[str]:
    body = wire.frame(hello("r", rank=rank, world_size=2, owner=4242)).hex()
    return subprocess.Popen(
        [sys.executable, "-c", AS_USER, str(uid), str(path), body, *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own, which other users cannot enter."""
    with tempfile.TemporaryDirectory(prefix="fp8w") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be several users")
@pytest.mark.parametrize("any_user", [True, False])
def test_another_user_gets_nothing_into_a_run(any_user: bool, folder: Path) -> None:
    path = folder / "agent.sock"
    listener = server.listen(path, EVERYBODY)  # the mode alone keeps nobody out here
    sessions: list[Silent] = []

    def open_session(run: str) -> Silent:
        sessions.append(Silent(run))
        return sessions[-1]

    async def scene() -> list[str]:
        agent = server.AgentServer(
            lifecycle=Lifecycle(is_embedded=False, started=time.monotonic(), connect_seconds=9, end_grace_seconds=9),
            metrics=MetricsState(clock=time.monotonic), open_session=open_session,
            owners=Owners(any_user=any_user, own_uid=1001),
        )  # fmt: skip
        serving = asyncio.create_task(agent.serve(listener))
        first = await asyncio.to_thread(ask, 1001, path, 0, "stay")
        while not sessions:
            await asyncio.sleep(0.02)
        second = await asyncio.to_thread(ask, 1002, path, 1)
        answers = list(await asyncio.to_thread(second.communicate, None, 10))
        first.kill()
        first.communicate()
        agent.stop()
        await serving
        return answers

    answers = asyncio.run(scene())
    assert [(message.rank, message.owner) for message in sessions[0].heard] == [(0, 1001)], "what the kernel says"
    if any_user:
        (body,) = wire.Splitter().feed(bytes.fromhex(answers[0]))
        reply = wire.unpack_reply(body)
        assert reply.term == 0
        assert "another user" in reply.warnings[0]
    else:
        assert answers[0] == ""


def test_the_socket_is_for_one_user_unless_asked(tmp_path: Path) -> None:
    for name, mode, expected in (("a", None, 0o600), ("b", EVERYBODY, 0o666)):
        path = tmp_path / name
        with server.listen(path) if mode is None else server.listen(path, mode):
            assert stat.S_IMODE(path.stat().st_mode) == expected
