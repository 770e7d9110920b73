"""A frame is put together by whoever needs it first: once, equal for all, and a failure costs only that frame."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fp8watch.capture.arrived import Arrived
from fp8watch.capture.frames import FrameParts, StepNote
from fp8watch.records import Layout, StepFrame
from fp8watch.transport.link import PAUSE_SECONDS, SHORT_PAUSE_SECONDS, Link
from fp8watch.transport.pending import PendingFrame, as_message
from fp8watch.transport.queue import OutgoingQueue

LAYOUT = Layout(run="r", attempt=0, rank=0, layout_id=1, expected_modules=0, observed_modules=0, columns=[])


class Parts:
    """Counts how often it was asked."""

    def __init__(self, step: int, make: Callable[[], StepFrame] | None = None) -> None:
        self.step, self.made = step, 0
        self._make = make

    def frame(self) -> StepFrame:
        self.made += 1
        if self._make is not None:
            return self._make()
        return StepFrame(run="r", rank=0, attempt=0, step=self.step, layout_id=1, time_unix=0.0, scalars={"loss": 1.0})

    def scalars(self) -> dict[str, float]:
        return {"loss": 1.0}


def test_the_frame_is_made_once_and_its_scalars_need_no_frame() -> None:
    parts = Parts(3)
    pending = PendingFrame(parts, parts.step)
    assert (pending.step, pending.scalars(), parts.made) == (3, {"loss": 1.0}, 0)
    frame = pending.frame()
    assert pending.frame() is frame is as_message(pending)
    assert (parts.made, pending.scalars()) == (1, frame.scalars)


def test_parts_of_a_step_give_the_scalars_of_its_frame() -> None:
    note = StepNote(step=7, attempt=0, layout=LAYOUT, time_unix=1.0, scalars={"loss": 0.5, "learning_rate": 1e-3})
    parts = FrameParts(run="r", rank=0, note=note, values=Arrived(b"", {}))
    assert parts.scalars() == parts.frame().scalars == {"loss": 0.5, "learning_rate": 1e-3}


def test_threads_that_ask_at_once_get_equal_frames() -> None:
    for _ in range(50):
        pending, barrier, found = PendingFrame(Parts(1), 1), threading.Barrier(3), list[StepFrame]()

        def ask(pending: PendingFrame = pending, barrier: threading.Barrier = barrier, found: Any = found) -> None:
            barrier.wait()
            found.append(pending.frame())

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert all(frame == found[0] for frame in found)


def test_a_pending_frame_is_bounded_like_a_frame() -> None:
    queue = OutgoingQueue(2)
    for step in range(5):
        queue.put(PendingFrame(Parts(step), step), "queue_full")
    assert queue.overflowed["queue_full"] == 3
    assert [as_message(queue.take()).step for _ in range(2)] == [3, 4]  # type: ignore[arg-type, union-attr]


def test_a_frame_that_cannot_be_made_is_counted_and_the_next_goes_out(tmp_path: Any) -> None:
    def fail() -> StepFrame:
        raise RuntimeError("torn")

    queue = OutgoingQueue(8)
    queue.put(PendingFrame(Parts(1, fail), 1), "queue_full")
    queue.put(PendingFrame(Parts(2), 2), "queue_full")
    link = Link(address=tmp_path / "s", settings=SimpleNamespace(), queue=queue, process=None)  # type: ignore[arg-type]
    link._load_next()
    assert (link.dropped["unencodable"], link._current) == (1, None)
    link._load_next()
    assert isinstance(link._current, StepFrame)
    assert link._current.step == 2
    with pytest.raises(RuntimeError):
        PendingFrame(Parts(1, fail), 1).frame()


@pytest.mark.parametrize(("room", "pause"), [(256, PAUSE_SECONDS), (4, SHORT_PAUSE_SECONDS)])
def test_the_training_thread_gets_its_turn_between_the_messages_of_a_backlog(room, pause, tmp_path, monkeypatch):
    queue = OutgoingQueue(room)
    for step in range(4):
        queue.put(PendingFrame(Parts(step), step), "queue_full")
    settings = SimpleNamespace(queue_frames=room)
    link = Link(address=tmp_path / "s", settings=settings, queue=queue, process=None)  # type: ignore[arg-type]
    pauses: list[float] = []
    monkeypatch.setattr(link._stopping, "wait", pauses.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        for _ in range(4):
            link._exchange(ours)
    assert pauses[0] == pause
    assert len(pauses) == 3  # nothing is left behind the last one
