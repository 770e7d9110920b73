"""The outgoing queue: order, bounds, and what is kept when there is no room."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from fp8watch.records import CommandResult, Message, StepFrame
from fp8watch.transport.queue import OutgoingQueue


def _frame(step: int) -> StepFrame:
    return StepFrame(run="r", attempt=0, rank=0, step=step, layout_id=1, time_unix=0.0, scalars={})


def _result(step: int) -> CommandResult:
    return CommandResult(id=str(step), run="r", attempt=0, rank=0, verb="apply", step=step, status="applied")


def _drain(queue: OutgoingQueue) -> list[Message]:
    taken = []
    while (message := queue.take()) is not None:
        taken.append(message)
    return taken


@given(kinds=st.lists(st.booleans(), max_size=80), limit=st.integers(1, 20))
def test_oldest_frames_go_first_and_everything_else_stays_in_order(kinds: list[bool], limit: int) -> None:
    queue = OutgoingQueue(limit)
    messages = [_frame(step) if is_frame else _result(step) for step, is_frame in enumerate(kinds)]
    for message in messages:
        queue.put(message, "queue_full")
    frames = [message for message in messages if isinstance(message, StepFrame)]
    kept_frames = frames[-limit:]
    expected = [m for m in messages if not isinstance(m, StepFrame) or m in kept_frames]
    assert len(queue) == len(expected)
    assert _drain(queue) == expected
    assert queue.overflowed["queue_full"] == len(frames) - len(kept_frames)
    assert len(queue) == 0


def test_nothing_is_lost_or_doubled_between_two_threads() -> None:
    queue = OutgoingQueue(8)
    taken: list[int] = []
    done = threading.Event()

    def consume() -> None:
        while True:
            is_last = done.is_set()
            for message in _drain(queue):
                assert isinstance(message, StepFrame | CommandResult)
                taken.append(message.step)
            if is_last:
                return

    consumer = threading.Thread(target=consume)
    consumer.start()
    total = 20_000
    for step in range(total):
        queue.put(_result(step) if step % 100 == 0 else _frame(step), "queue_full")
    done.set()
    consumer.join()
    assert taken == sorted(set(taken))
    assert len(taken) + queue.overflowed["queue_full"] == total
    assert set(range(0, total, 100)) <= set(taken)
