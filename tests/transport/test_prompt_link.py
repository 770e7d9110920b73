"""What is waited for leaves at once and the end waits for nothing, although frames are looked for only now and then."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fp8watch import wire
from fp8watch.records import (
    CheckpointRecord,
    CommandResult,
    Evaluation,
    Hello,
    Layout,
    LedgerUpdate,
    Message,
    StepFrame,
    Welcome,
)
from fp8watch.settings import Settings
from fp8watch.transport import Channel
from fp8watch.transport.link import Link
from fp8watch.transport.queue import OutgoingQueue
from fp8watch.transport.rhythm import MOST_SECONDS

HELLO = Hello(
    wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=0.0, step=0
)
RESULT = CommandResult(id="c", run="r", attempt=0, rank=0, verb="apply", step=3, status="applied")
AWAITED: list[Message] = [
    RESULT,
    CheckpointRecord(run="r", attempt=0, checkpoint="step-3", step=3, path="p", label="pending"),
    Evaluation(run="r", attempt=0, step=3, scores={"task": 0.5}),
    Layout(run="r", attempt=0, rank=0, layout_id=2, columns=[], expected_modules=0, observed_modules=0),
    HELLO,
]
STEP_SECONDS = 10.0
"""Of the steps that the frames tell of: the thread looks for the next one as seldom as it ever does."""
BIG = {f"s{n}": float(n) for n in range(30_000)}
"""More than a socket holds."""


def step_frame(step: int, scalars: dict[str, float] | None = None) -> StepFrame:
    return StepFrame(
        run="r", attempt=0, rank=0, step=step, layout_id=1, time_unix=STEP_SECONDS * step, scalars=scalars or {}
    )


class Listener:
    """Takes one connection after the other, and reads only when asked to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(path))
        self._socket.listen(8)
        self._socket.settimeout(20)
        self.accepted: list[socket.socket] = []

    @property
    def peer(self) -> socket.socket:
        return self.accepted[-1]

    def accept(self) -> None:
        peer, _ = self._socket.accept()
        peer.settimeout(20)
        self.accepted.append(peer)
        self._splitter = wire.Splitter()

    def read_until(self, is_last: Callable[[Message], bool]) -> list[Message]:
        found: list[Message] = []
        while not (found and is_last(found[-1])):
            data = self.peer.recv(1 << 20)
            assert data, "end of stream"
            found += [wire.unpack_message(body) for body in self._splitter.feed(data)]
        return found

    def read_to_the_end(self) -> threading.Thread:
        """As an agent does: it closes its end when the rank has closed the other."""
        peer = self.peer

        def read() -> None:
            while peer.recv(1 << 20):
                pass
            peer.close()

        thread = threading.Thread(target=read)
        thread.start()
        return thread

    def close(self) -> None:
        for peer in self.accepted:
            peer.close()
        self._socket.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "a.sock")
    yield listener
    listener.close()


@pytest.fixture
def channel(listener: Listener) -> Iterator[Channel]:
    channel = channel_to(listener)
    yield channel
    channel.close(0.1)


def channel_to(listener: Listener) -> Channel:
    return Channel(run="r", settings=Settings(agent=f"unix://{listener.path}", connect_seconds=1.0))


def seconds_of(work: Callable[[], Any]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def until(condition: Callable[[], Any], timeout_seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def train_slowly(channel: Channel, listener: Listener) -> None:
    """On return the thread has just looked, and will not look for frames again for `MOST_SECONDS`."""
    channel.set_preamble([HELLO])
    listener.accept()
    for step in (1, 2, 3):
        channel.send(step_frame(step))
    listener.read_until(lambda message: isinstance(message, StepFrame) and message.step == 3)


@pytest.mark.parametrize("message", AWAITED, ids=lambda message: type(message).__name__)
def test_what_is_waited_for_leaves_at_once(listener: Listener, channel: Channel, message: Message) -> None:
    train_slowly(channel, listener)
    seconds = 0.0
    for _ in range(6):
        channel.send(message)
        seconds += seconds_of(lambda: listener.read_until(lambda read: read == message))
    # Each is sent right after a look.
    assert seconds < 3 * MOST_SECONDS


def test_a_frame_leaves_before_the_answer_that_follows_it(listener: Listener, channel: Channel) -> None:
    train_slowly(channel, listener)
    channel.send(step_frame(4))
    channel.send(RESULT)
    assert listener.read_until(lambda message: message == RESULT) == [step_frame(4), RESULT]


def test_answers_of_a_time_without_agent_reach_the_next_one(listener: Listener, channel: Channel) -> None:
    train_slowly(channel, listener)
    listener.peer.close()
    until(lambda: not channel.is_connected)
    for message in AWAITED[:3]:
        channel.send(message)
    listener.accept()
    read = listener.read_until(lambda message: message == AWAITED[2])
    assert read == [msgspec.structs.replace(HELLO, step=3), *AWAITED[:3]]


def test_close_does_not_wait_for_the_next_look(listener: Listener) -> None:
    seconds = 0.0
    for _ in range(6):
        channel = channel_to(listener)
        train_slowly(channel, listener)
        agent = listener.read_to_the_end()
        channel.send(step_frame(4))
        seconds += seconds_of(lambda: channel.close(5.0))  # noqa: B023
        agent.join()
    assert seconds < 3 * MOST_SECONDS


def test_close_ends_in_time_when_the_socket_is_full(listener: Listener, channel: Channel) -> None:
    channel.set_preamble([HELLO])
    listener.accept()
    for step in range(1, 4):
        channel.send(step_frame(step, BIG))
    until(lambda: len(channel._queue) == 2)
    assert seconds_of(lambda: channel.close(0.3)) < 0.3 + 0.5
    link = channel._link
    assert link is not None
    link.join(10.0)
    assert not link.is_alive()


@pytest.mark.parametrize("state", ["idle", "socket full", "agent writes no more", "agent reads no more", "absent"])
def test_the_thread_sleeps_in_every_state(listener: Listener, channel: Channel, state: str) -> None:
    """Also when somebody rings that cannot be served."""
    train_slowly(channel, listener)
    if state == "socket full":
        for step in range(4, 10):
            channel.send(step_frame(step, BIG))
        until(lambda: len(channel._queue) == 5)
    elif state == "agent writes no more":
        listener.peer.shutdown(socket.SHUT_WR)  # the thread connects again, and nobody accepts
    elif state == "agent reads no more":
        listener.peer.shutdown(socket.SHUT_RD)
    elif state == "absent":
        listener.path.unlink()
        listener.close()
    for _ in range(20):
        channel.send(RESULT)
    time.sleep(0.1)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.15


def test_what_an_agent_said_before_it_hung_up_is_read(tmp_path: Path) -> None:
    """It refuses the rank and closes without reading on, while frames are being sent."""
    for number in range(20):
        listener = Listener(tmp_path / str(number))
        channel = channel_to(listener)
        channel.set_preamble([HELLO])
        for step in range(1, 200):
            channel.send(step_frame(step, {f"s{n}": 1.0 for n in range(50)}))
        listener.accept()
        listener.peer.recv(100)
        listener.peer.sendall(wire.frame(Welcome(wire_version=1, run="r", term=0, warnings=["refused"])))
        listener.close()
        assert until(channel.notes) == ["refused"]
        channel.close(0.0)


class _Chatterbox:
    """A socket that takes nothing any more and never ends talking."""

    def __init__(self) -> None:
        self.num_reads = 0

    def send(self, data: memoryview) -> int:
        raise BrokenPipeError

    def recv(self, size: int) -> bytes:
        self.num_reads += 1
        assert self.num_reads < 10_000, "it is listened to for ever"
        return wire.frame(LedgerUpdate(run="r", checkpoint="c", label="good"))


def test_an_agent_that_talks_without_listening_is_left(tmp_path: Path) -> None:
    queue = OutgoingQueue(4)
    link = Link(address=tmp_path / "s", settings=Settings(), queue=queue, process=None)
    queue.put(RESULT, "queue_full")
    chatterbox: Any = _Chatterbox()
    link._exchange(chatterbox)
    assert chatterbox.num_reads > 0
    assert len(link.inbox) == chatterbox.num_reads


def test_a_message_cut_off_by_the_agents_death_is_sent_again_whole(listener: Listener, channel: Channel) -> None:
    train_slowly(channel, listener)
    channel.send(step_frame(4, BIG))
    assert listener.peer.recv(1000)
    listener.peer.close()
    listener.accept()
    read = listener.read_until(lambda message: isinstance(message, StepFrame))
    assert read == [msgspec.structs.replace(HELLO, step=3), step_frame(4, BIG)]
    assert channel.dropped == {}


def test_a_child_forked_while_the_thread_waits_disturbs_nobody(listener: Listener, channel: Channel) -> None:
    train_slowly(channel, listener)
    pid = os.fork()
    if pid == 0:
        is_dead = not channel.send(RESULT) and not channel.send(step_frame(9))
        channel.close(1.0)
        os._exit(0 if is_dead else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    channel.send(step_frame(4))
    channel.send(RESULT)
    assert listener.read_until(lambda message: message == RESULT) == [step_frame(4), RESULT]
    agent = listener.read_to_the_end()
    channel.close(5.0)
    agent.join(10.0)
    assert not agent.is_alive()


def test_no_descriptor_is_left_behind(listener: Listener) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        channel = channel_to(listener)
        train_slowly(channel, listener)
        agent = listener.read_to_the_end()
        channel.close(5.0)
        agent.join()
        link = channel._link
        assert link is not None
        link.join()
        del channel, link
    assert count() == before


def test_training_goes_on_when_no_descriptor_is_left(listener: Listener) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        channel = channel_to(listener)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    channel.set_preamble([HELLO])
    assert not channel.send(step_frame(1))
    assert channel.dropped == {"disconnected": 1}
    assert not channel.is_watched
    (note,) = channel.notes()
    assert "training goes on unwatched" in note
    channel.close(1.0)
