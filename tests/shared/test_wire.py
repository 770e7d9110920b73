"""The socket format: every record survives the trip, and nothing malformed gets through or kills a reader."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from fp8watch import bounds, columns, wire
from fp8watch.errors import WireError
from fp8watch.records import Command, Evaluation, Goodbye, StepFrame

scalars = st.dictionaries(st.text(max_size=12), st.floats(allow_nan=False), max_size=6)
frames = st.builds(
    StepFrame,
    run=st.text(min_size=1, max_size=20),
    attempt=st.integers(0, 2**31 - 1),
    rank=st.integers(0, bounds.MAX_WORLD_SIZE - 1),
    step=st.integers(0, bounds.LARGEST_SENT),
    layout_id=st.integers(0, 2**31),
    time_unix=st.floats(0, 4e9),
    scalars=scalars,
)


@given(st.lists(frames, min_size=1, max_size=4), st.integers(1, 200))
def test_frames_survive_any_cut_of_the_stream(sent: list[StepFrame], cut: int) -> None:
    stream = b"".join(wire.frame(record) for record in sent)
    splitter, got = wire.Splitter(), []
    for start in range(0, len(stream), cut):
        got += [wire.unpack_message(body) for body in splitter.feed(stream[start : start + cut])]
    assert got == sent


@given(st.binary(max_size=300))
def test_garbage_is_a_wire_error_and_nothing_else(body: bytes) -> None:
    for decode in (wire.unpack_message, wire.unpack_reply, wire.unpack_stored):
        try:
            decode(body)
        except WireError:
            continue


@given(frames, st.data())
def test_a_truncated_record_is_refused(record: StepFrame, data: st.DataObject) -> None:
    body = wire.pack(record)
    with pytest.raises(WireError):
        wire.unpack_message(body[: data.draw(st.integers(0, len(body) - 1))])


def test_a_reply_is_no_message() -> None:
    command = Command(id="c", run="r", attempt=0, term=1, sequence=1, verb="apply", action="halt", last_step=9)
    assert wire.unpack_reply(wire.pack(command)) == command
    with pytest.raises(WireError):
        wire.unpack_message(wire.pack(command))


def test_an_oversized_length_is_refused_before_the_body_arrives() -> None:
    splitter = wire.Splitter(limit=64)
    with pytest.raises(WireError, match="announced"):
        list(splitter.feed(wire.frame(Evaluation(run="r" * 100, attempt=0, step=1, scores={}))[:5]))


def test_nan_and_infinity_are_observations() -> None:
    frame = StepFrame(
        run="r", attempt=0, rank=0, step=1, layout_id=0, time_unix=0.0,
        scalars={"loss": float("nan"), "grad_norm": float("inf")},
    )  # fmt: skip
    back = wire.unpack_message(wire.pack(frame))
    assert isinstance(back, StepFrame)
    assert np.isnan(back.scalars["loss"])
    assert np.isposinf(back.scalars["grad_norm"])
    assert isinstance(wire.unpack_message(wire.pack(Goodbye(run="r", rank=0, step=3))), Goodbye)


@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.booleans()), max_size=70))
def test_columns_keep_values_and_what_was_observed(pairs: list[tuple[float, bool]]) -> None:
    values = np.array([value for value, _ in pairs], dtype=np.float32)
    valid = np.array([seen for _, seen in pairs], dtype=np.bool_)
    got_values, got_valid = columns.unpack(columns.pack(values, "f4", valid))
    np.testing.assert_array_equal(got_values, values)
    np.testing.assert_array_equal(got_valid, valid)


def test_a_bitmap_that_does_not_fit_is_refused() -> None:
    column = columns.pack(np.arange(20), "u8", np.arange(20) > 3)
    with pytest.raises(WireError, match="bitmap"):
        columns.unpack(msgspec.structs.replace(column, valid=b"\x00"))
    with pytest.raises(WireError, match="whole number"):
        columns.unpack(msgspec.structs.replace(column, data=b"123"))
