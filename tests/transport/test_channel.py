"""The channel against a listener of our own: preamble, order, replies, hung and absent agents, forks, exit."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fp8watch import wire
from fp8watch.errors import BadInput
from fp8watch.records import (
    CommandResult,
    Goodbye,
    Hello,
    LedgerUpdate,
    Message,
    Reply,
    StepFrame,
    Welcome,
)
from fp8watch.settings import Settings
from fp8watch.transport import Channel

HELLO = Hello(
    wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=0.0, step=0
)


def _frame(step: int, **scalars: float) -> StepFrame:
    return StepFrame(run="r", attempt=0, rank=0, step=step, layout_id=1, time_unix=0.0, scalars=scalars)


def _result(step: int) -> CommandResult:
    return CommandResult(id=f"c{step}", run="r", attempt=0, rank=0, verb="apply", step=step, status="applied")


def _until(condition: Callable[[], Any], timeout_seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


class _Agent:
    """A listener that takes one connection after the other and reads only when asked to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(os.fspath(path))
        self.listener.listen(1)
        self.listener.settimeout(20)
        self.peer: socket.socket | None = None

    def accept(self) -> None:
        self.hang_up()
        self.peer, _ = self.listener.accept()
        self.peer.settimeout(20)
        self._splitter = wire.Splitter()
        self._ready: list[Message] = []

    def read(self, count: int) -> list[Message]:
        assert self.peer is not None
        while len(self._ready) < count:
            data = self.peer.recv(1 << 20)
            assert data, f"end of stream after {len(self._ready)} of {count} messages"
            self._ready += [wire.unpack_message(body) for body in self._splitter.feed(data)]
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def reply(self, *replies: Reply) -> None:
        assert self.peer is not None
        self.peer.sendall(b"".join(wire.frame(reply) for reply in replies))

    def is_at_end(self) -> bool:
        assert self.peer is not None
        while data := self.peer.recv(1 << 20):
            del data
        return True

    def hang_up(self) -> None:
        if self.peer is not None:
            self.peer.close()
            self.peer = None

    def close(self) -> None:
        self.hang_up()
        self.listener.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[_Agent]:
    agent = _Agent(tmp_path / "a.sock")
    yield agent
    agent.close()


@pytest.fixture
def channel(agent: _Agent) -> Iterator[Channel]:
    channel = Channel(run="r", settings=Settings(agent=f"unix://{agent.path}", queue_frames=16, connect_seconds=0.3))
    yield channel
    channel.close(0.1)


def test_preamble_comes_first_on_every_connection(agent: _Agent, channel: Channel) -> None:
    channel.set_preamble([HELLO])
    channel.send(_frame(1))
    agent.accept()
    assert agent.read(2) == [HELLO, _frame(1)]
    agent.hang_up()
    for step in (2, 3):
        channel.send(_frame(step))
    agent.accept()
    first, *rest = agent.read(2)
    assert isinstance(rest[0], StepFrame)
    assert first == msgspec.structs.replace(HELLO, step=rest[0].step - 1), "it says where the frames go on"
    channel.send(_frame(4))
    steps = [rest[0].step]
    while steps[-1] != 4:
        steps += [message.step for message in agent.read(1) if isinstance(message, StepFrame)]
    # What had left for the closed socket may be lost; nothing is doubled or out of order.
    assert steps == sorted(set(steps))


def test_replies_and_warnings_arrive_once(agent: _Agent, channel: Channel) -> None:
    channel.set_preamble([HELLO])
    agent.accept()
    welcome = Welcome(wire_version=1, run="r", term=3, warnings=["the disk is full"])
    update = LedgerUpdate(run="r", checkpoint="step-4", label="good")
    agent.reply(welcome, update)
    agent.reply(welcome)
    replies: list[Reply] = []
    _until(lambda: replies.extend(channel.take()) or len(replies) == 3)
    assert replies == [welcome, update, welcome]
    assert channel.take() == []
    assert channel.notes() == ["the disk is full"]
    assert channel.notes() == []


def test_what_the_agent_says_late_in_a_long_run_is_not_withheld(agent: _Agent, channel: Channel) -> None:
    channel.set_preamble([HELLO])
    agent.accept()
    questions = [f"question {number}" for number in range(200)]
    said: list[str] = []
    for question in questions:
        agent.reply(Welcome(wire_version=1, run="r", term=3, warnings=["the disk is full", question]))
        _until(lambda: said.extend(channel.notes()) or said[-1:] == [question])  # noqa: B023
    assert said == ["the disk is full", *questions]


def test_a_hung_agent_costs_nothing_and_loses_only_old_frames(agent: _Agent, channel: Channel) -> None:
    """An agent that reads nothing: socket buffer and queue fill, send stays quick, drops are counted and told."""
    channel.set_preamble([HELLO])
    agent.accept()
    assert agent.read(1) == [HELLO]
    padding = {f"scalar_{n}": float(n) for n in range(2000)}
    seconds = []
    for step in range(1, 301):
        message = _result(step) if step == 150 else _frame(step, **padding)
        started = time.perf_counter()
        assert channel.send(message)
        seconds.append(time.perf_counter() - started)
        time.sleep(0.001)
    seconds.sort()
    assert seconds[len(seconds) // 2] < 100e-6
    assert seconds[-6] < 5e-3  # the scheduler may take the processor away now and then
    _until(lambda: channel.dropped.get("queue_full", 0) > 100)
    channel.send(_frame(301))
    received: list[Message] = []
    while not (received and isinstance(received[-1], StepFrame) and received[-1].step == 301):
        received += agent.read(1)
    num_frames = sum(isinstance(message, StepFrame) for message in received)
    assert any(isinstance(message, CommandResult) for message in received)
    assert num_frames + channel.dropped["queue_full"] == 300
    last = received[-1]
    assert isinstance(last, StepFrame)
    assert last.dropped == channel.dropped


def test_an_absent_agent_is_noted_once_and_frames_are_held(agent: _Agent, channel: Channel) -> None:
    agent.close()
    for step in range(1, 41):
        channel.send(_frame(step))
    notes: list[str] = []
    _until(lambda: notes.extend(channel.notes()) or notes)
    assert "no agent at" in notes[0]
    time.sleep(0.5)
    assert channel.notes() == []
    assert channel.dropped == {"disconnected": 40 - 16}
    again = _Agent(agent.path)
    try:
        again.accept()
        frames = again.read(16)
        assert [m.step for m in frames if isinstance(m, StepFrame)] == list(range(25, 41))
        assert "reached again" in _until(channel.notes)[0]
    finally:
        again.close()


def test_what_cannot_be_sent_is_dropped_by_name(
    agent: _Agent, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    channel.set_preamble([HELLO])
    agent.accept()
    channel.send(_frame(1, **{f"scalar_{n}": 1.0 for n in range(200)}))
    channel.send(CommandResult(
        id="x", run="r", attempt=0, rank=0, verb="apply", step=1, status="applied", observed={"a": object()}
    ))  # fmt: skip
    channel.send(_frame(2))
    assert [type(message) for message in agent.read(2)] == [Hello, StepFrame]
    assert channel.dropped == {"too_large": 1, "unencodable": 1}


def test_a_stranger_on_the_socket_is_survived(agent: _Agent, channel: Channel) -> None:
    channel.set_preamble([HELLO])
    agent.accept()
    assert agent.peer is not None
    agent.peer.sendall(b"\x00\x00\x00\x03abc" + b"HTTP/1.1 400 Bad Request\r\n")
    agent.accept()
    assert agent.read(1) == [HELLO]
    notes: list[str] = []
    _until(lambda: notes.extend(channel.notes()) or len(notes) == 2)
    assert "not understood" in notes[0]
    assert "does not speak fp8watch" in notes[1]


def test_close_sends_what_is_queued_and_ends_the_stream(agent: _Agent, channel: Channel) -> None:
    channel.set_preamble([HELLO])
    agent.accept()
    for step in range(1, 11):
        channel.send(_frame(step))
    channel.send(Goodbye(run="r", rank=0, step=10))
    channel.close(2.0)
    assert len(agent.read(12)) == 12
    assert agent.is_at_end()
    assert not channel.send(_frame(11))
    assert channel.dropped == {"closed": 1}


def test_close_does_not_wait_for_an_agent_that_hangs(agent: _Agent, channel: Channel) -> None:
    channel.set_preamble([HELLO])
    agent.accept()
    for step in range(1, 17):
        channel.send(_frame(step, **{f"scalar_{n}": float(n) for n in range(5000)}))
    started = time.monotonic()
    channel.close(0.3)
    assert time.monotonic() - started < 5.0


# case: PRM-01
def test_a_forked_child_does_not_keep_the_socket_open(agent: _Agent, channel: Channel) -> None:
    """A worker that outlives the trainer must not look like the trainer."""
    channel.set_preamble([HELLO])
    agent.accept()
    assert agent.read(1) == [HELLO]
    release, hold = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1 if channel.send(_frame(1)) else 0
        os.close(hold)
        os.read(release, 1)
        os._exit(code)
    try:
        os.close(release)
        channel.close(0.5)
        assert agent.is_at_end()
    finally:
        os.close(hold)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert channel.dropped == {}


@pytest.mark.parametrize("address", ["tcp://1.2.3.4:5", "/run/agent.sock", "unix://relative.sock"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match="FP8WATCH_AGENT"):
        Channel(run="r", settings=Settings(agent=address))


def test_a_cluster_agent_is_never_started_by_us(tmp_path: Path) -> None:
    channel = Channel(run="r", settings=Settings(agent=f"unix://{tmp_path}/none.sock"))
    channel.set_preamble([HELLO])
    time.sleep(0.3)
    channel.close(0.1)
    assert not (tmp_path / ".fp8watch").exists()


def test_only_local_rank_0_starts_a_process(tmp_path: Path) -> None:
    channel = Channel(run="r", settings=Settings(dir=tmp_path / "home"), local_rank=1)
    channel.set_preamble([HELLO])
    time.sleep(0.3)
    channel.close(0.1)
    assert not (tmp_path / "home").exists()
