"""The embedded process comes up late, or is killed and started again: every frame is judged, or counted as unseen."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import Finding, Goodbye, Hello, Layout, Message, StepFrame
from fp8watch.settings import Settings
from fp8watch.transport import Channel, endpoint
from fp8watch.transport.process import AgentProcess


def first_messages(rank: int = 0, world_size: int = 1) -> list[Message]:
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=rank, local_rank=rank, world_size=world_size, pid=os.getpid(),
        host="h", time_unix=time.time(), step=0,
    )  # fmt: skip
    layout = Layout(
        run="r", attempt=0, rank=rank, layout_id=0, columns=[], expected_modules=0, observed_modules=0
    )  # fmt: skip
    return [hello, layout]


def frame(step: int, rank: int = 0, loss: float = 2.0) -> StepFrame:
    return StepFrame(
        run="r", attempt=0, rank=rank, step=step, layout_id=0, time_unix=time.time(), scalars={"loss": loss}
    )


def until(condition: Callable[[], Any], timeout_seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def stored(home: Path, kind: type[Any]) -> list[Any]:
    found = endpoint.read(home, "r")
    if found is None or not Path(found.store).is_file():
        return []
    store = SqliteStore(found.store, read_only=True)
    try:
        return list(store.read("r", kind))
    finally:
        store.close()


def unseen(home: Path, reason: str) -> float:
    found = endpoint.read(home, "r")
    assert found is not None
    with urllib.request.urlopen(found.metrics_url, timeout=5) as response:
        lines = response.read().decode().splitlines()
    name = f'fp8watch_frames_unseen_total{{reason="{reason}",run="r"}} '
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "home"


@pytest.fixture
def make_channel(home: Path) -> Iterator[Callable[[int], Channel]]:
    made: list[Channel] = []

    def make(rank: int) -> Channel:
        made.append(Channel(run="r", settings=Settings(dir=home, metrics_port=0), local_rank=rank))
        return made[-1]

    yield make
    for channel in reversed(made):
        channel.close(1.0)


def test_what_happens_before_the_agent_is_up_is_found_in_its_own_step(
    home: Path, make_channel: Callable[[int], Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine starts the process seconds after training began."""
    start, has_trained = AgentProcess.start, threading.Event()

    def start_late(process: AgentProcess) -> None:
        has_trained.wait(60.0)  # on the transport thread
        start(process)

    monkeypatch.setattr(AgentProcess, "start", start_late)
    channel = make_channel(0)
    channel.set_preamble(first_messages())
    for step in range(1, 101):
        channel.send(frame(step, loss=math.nan if step == 3 else 2.0))
    assert not channel.is_connected
    has_trained.set()
    channel.send(Goodbye(run="r", rank=0, step=100))
    channel.close(30.0)
    until(lambda: (found := endpoint.read(home, "r")) and found.state == "ended")
    assert [frame.step for frame in stored(home, StepFrame)] == list(range(1, 101))
    (finding,) = [finding for finding in stored(home, Finding) if finding.detector == "nonfinite"]
    assert (finding.step, finding.onset_step) == (3, 3)


def test_two_ranks_of_which_one_comes_late_are_judged_together(
    home: Path, make_channel: Callable[[int], Channel]
) -> None:
    """The second connects a hundred steps after the first; its bad step is found, as its own."""
    first, second = make_channel(0), make_channel(1)
    first.set_preamble(first_messages(0, 2))
    for step in range(1, 101):
        first.send(frame(step))
    until(lambda: len(stored(home, StepFrame)) == 100)
    second.set_preamble(first_messages(1, 2))
    for step in range(1, 101):
        second.send(frame(step, rank=1, loss=math.inf if step == 4 else 2.0))
    (finding,) = until(lambda: stored(home, Finding))
    assert (finding.detector, finding.step, finding.rank) == ("nonfinite", 4, 1)
    assert unseen(home, "late") == unseen(home, "missing") == 0


def test_frames_that_die_with_the_process_are_counted(home: Path, make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(0)
    channel.set_preamble(first_messages())
    channel.send(frame(1))
    until(lambda: stored(home, StepFrame))
    before = endpoint.read(home, "r")
    assert before is not None
    os.kill(before.pid, signal.SIGSTOP)  # takes nothing in any more, and its socket does
    for step in range(2, 41):
        channel.send(frame(step))
    until(lambda: not len(channel._queue))
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: (found := endpoint.read(home, "r")) and found.pid != before.pid)
    step = 40
    while not (seen := [frame.step for frame in stored(home, StepFrame)]) or seen[-1] <= 41:
        step += 1
        channel.send(frame(step))
        time.sleep(0.05)
    lost = sorted(set(range(1, seen[-1] + 1)) - set(seen))
    assert len(lost) >= 38, "they were on their way, but for one that may have been in hand"
    until(lambda: unseen(home, "missing") == len(lost))


def test_a_training_that_is_over_at_once_is_on_record(home: Path, make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(0)
    channel.set_preamble(first_messages())
    channel.send(frame(1))
    channel.send(Goodbye(run="r", rank=0, step=1))
    channel.close(30.0)
    assert [frame.step for frame in until(lambda: stored(home, StepFrame))] == [1]


def test_an_agent_that_never_was_is_not_waited_for_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    channel = Channel(run="r", settings=Settings(agent=f"unix://{tmp_path}/none.sock"))
    channel.set_preamble(first_messages())
    channel.send(frame(1))
    started = time.monotonic()
    channel.close(10.0)
    assert time.monotonic() - started < 8.0
    assert "1 messages were not sent: no agent at" in caplog.text
