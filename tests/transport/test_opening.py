"""Whenever a connection is made, the agent knows attempt, step and layout of every message that follows on it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch import wire
from fp8watch.records import CheckpointRecord, Hello, Layout, Message, StepFrame
from fp8watch.settings import Settings
from fp8watch.transport import Channel
from fp8watch.transport.opening import MAX_REMOVED, Opening


def hello(attempt: int, step: int, **more: object) -> Hello:
    fields = {"local_rank": 0, "world_size": 1, "pid": 1, "host": "h", "time_unix": 0.0, **more}
    return Hello(wire_version=1, run="r", attempt=attempt, rank=0, step=step, **fields)  # type: ignore[arg-type]


def layout(attempt: int, layout_id: int) -> Layout:
    return Layout(
        run="r", attempt=attempt, rank=0, layout_id=layout_id, columns=[], expected_modules=0, observed_modules=0
    )


def frame(attempt: int, step: int, layout_id: int = 1) -> StepFrame:
    return StepFrame(run="r", attempt=attempt, rank=0, step=step, layout_id=layout_id, time_unix=0.0, scalars={})


def checkpoint(step: int, path: str = "p") -> CheckpointRecord:
    return CheckpointRecord(run="r", attempt=0, checkpoint=f"c{step}", step=step, path=path, label="candidate")


TRAINING: list[Message] = [
    hello(0, 0, num_parameters=7),  # said again before the first step: something became available
    frame(0, 1),
    frame(0, 2),
    checkpoint(2),
    layout(0, 2),
    frame(0, 3, 2),
    hello(0, 5, armed=False),  # in the middle, while frames of earlier steps are still on the device
    frame(0, 4, 2),
    frame(0, 5, 2),
    hello(1, 2),  # rolled back
    layout(1, 2),
    frame(1, 3, 2),
    frame(1, 4, 2),
]
"""What a rank says in the order in which it says it."""


@pytest.mark.parametrize("num_before", range(len(TRAINING) + 1))
def test_a_late_agent_is_told_everything_in_order(tmp_path: Path, num_before: int) -> None:
    """However much of the training is over when the agent comes up."""
    path = tmp_path / "a.sock"
    channel = Channel(run="r", settings=Settings(agent=f"unix://{path}"))
    channel.set_preamble([hello(0, 0), layout(0, 1)])
    for message in TRAINING[:num_before]:
        channel.send(message)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(os.fspath(path))
            listener.listen(1)
            listener.settimeout(20)
            peer, _ = listener.accept()
            for message in TRAINING[num_before:]:
                channel.send(message)
            with peer:
                peer.settimeout(20)
                splitter = wire.Splitter()
                received: list[Message] = []
                while len(received) < len(TRAINING) + 2:
                    received += [wire.unpack_message(body) for body in splitter.feed(peer.recv(65536))]
        assert received == [hello(0, 0), layout(0, 1), *TRAINING]
    finally:
        channel.close(0.1)


@given(st.lists(st.integers(0, len(TRAINING)), max_size=4))
def test_each_new_connection_opens_where_the_queue_stands(cuts: list[int]) -> None:
    """The agent may be another process each time and know nothing."""
    opening = Opening([hello(0, 0), layout(0, 1)])
    attempt, step, layout_id, known = -1, -1, -1, set[str]()
    for position, message in enumerate(TRAINING):
        for _ in range(1 if position == 0 else cuts.count(position)):
            attempt, step, layout_id, known = -1, -1, -1, set()
            for said in opening.messages():
                if isinstance(said, Hello):
                    attempt, step = said.attempt, said.step
                elif isinstance(said, Layout):
                    layout_id = said.layout_id
                elif isinstance(said, CheckpointRecord):
                    known.add(said.checkpoint)
        if isinstance(message, Hello):
            attempt, step = message.attempt, min(step, message.step) if message.attempt == attempt else message.step
        elif isinstance(message, Layout):
            layout_id = message.layout_id
        elif isinstance(message, CheckpointRecord):
            known.add(message.checkpoint)
        elif isinstance(message, StepFrame):
            assert (message.attempt, message.step, message.layout_id) == (attempt, step + 1, layout_id)
            step = message.step
            assert known == ({"c2"} if message.attempt > 0 or message.step > 2 else set())
        opening.passed(message)


def test_a_frame_that_was_dropped_is_missed_by_the_next_agent() -> None:
    """The opening says what went out, not what was to: the gap shows."""
    opening = Opening([hello(0, 0)])
    opening.passed(frame(0, 1))
    (said,) = opening.messages()
    assert isinstance(said, Hello)
    assert said.step == 1


def test_removed_checkpoints_are_told_and_do_not_pile_up() -> None:
    opening = Opening([checkpoint(0)])
    for step in range(1, MAX_REMOVED + 11):
        opening.passed(checkpoint(step))
        opening.passed(checkpoint(step, path=""))
    records = [said for said in opening.messages() if isinstance(said, CheckpointRecord)]
    assert records[0] == checkpoint(0)
    assert [record.step for record in records[1:]] == list(range(11, MAX_REMOVED + 11))
