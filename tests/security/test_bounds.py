"""What a record may say at most: out of bounds is malformed, and what is within them can be added to and stored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench import fuzz_wire
from fp8watch import bounds, records, wire
from fp8watch.controller.cluster import memory
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.service import RunController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import BadInput, WireError
from fp8watch.policy.load import parse
from fp8watch.settings import from_environment
from fp8watch_agent.cli import app as agent_cli

SENT = [record for record in fuzz_wire.samples() if isinstance(record, records.Uplink)]
HUGE = st.integers(min_value=-(2**63), max_value=2**64 - 1) | st.sampled_from([2**63 - 1, 2**64 - 1, 2**53, 2**40, -1])


def tree(record: records.Record) -> dict[str, Any]:
    found = msgspec.msgpack.decode(wire.pack(record))
    assert isinstance(found, dict)
    return found


def whole_numbers(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the whole numbers of a decoded record are."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place for key, item in items for place in whole_numbers(item, (*at, key))]
    return [at, *found] if type(value) is int else found


PLACES = [(record, at) for record in SENT for at in whole_numbers(tree(record)) if at[0] not in ("scalars", "scores")]


def changed(record: records.Record, at: tuple[Any, ...], value: object) -> bytes:
    found = tree(record)
    node: Any = found
    for key in at[:-1]:
        node = node[key]
    node[at[-1]] = value
    return msgspec.msgpack.encode(found)


@pytest.mark.parametrize("value", [2**64 - 1, 2**63, -(2**63), -1])
@pytest.mark.parametrize(("record", "at"), PLACES, ids=lambda item: getattr(type(item), "__name__", ""))
def test_no_whole_number_that_is_sent_is_unbounded(record: records.Record, at: tuple[Any, ...], value: int) -> None:
    with pytest.raises(WireError):
        wire.unpack_uplink(changed(record, at, value))


@given(st.sampled_from(PLACES), HUGE)
@example((fuzz_wire.hello(1), ("journal_term",)), bounds.LARGEST_SENT)
@example((fuzz_wire.frame(1, 7), ("step",)), bounds.LARGEST_SENT)
@settings(max_examples=200, deadline=None)
def test_what_is_within_the_bounds_can_be_added_to_remembered_and_stored(
    place: tuple[records.Record, tuple[Any, ...]], value: int
) -> None:
    try:
        message = wire.unpack_uplink(changed(*place, value))
    except WireError:
        return
    for controller in (RunController(MemoryStore(), clock=lambda: 1.0), ClusterController(MemoryStore(), clock=float)):
        take: Any = controller.take if isinstance(controller, ClusterController) else controller.receive
        for given_one in (fuzz_wire.hello(1), fuzz_wire.layout(1), message, fuzz_wire.frame(1, 8)):
            if isinstance(controller, ClusterController) or not isinstance(
                given_one, records.NodeFrame | records.RankLost
            ):
                for reply in take(given_one):
                    wire.unpack_reply(wire.pack(reply))
        store: MemoryStore = controller._store  # type: ignore[assignment]
        for run in store.runs():
            wire.unpack_stored(wire.pack(run))
        if isinstance(controller, ClusterController) and (left := controller.memory("r")) is not None:
            assert left
            ClusterController(MemoryStore(), clock=float).adopt("r", left, [])


@given(st.sampled_from(["run", "node"]), st.integers(min_value=0, max_value=100_000))
@settings(max_examples=50, deadline=None)
def test_a_name_has_a_length_and_is_never_empty(field: str, length: int) -> None:
    body = changed(fuzz_wire.node_frame(1, 7), (field,), "x" * length)
    if 1 <= length <= bounds.MAX_NAME_LENGTH:
        wire.unpack_uplink(body)
    else:
        with pytest.raises(WireError):
            wire.unpack_uplink(body)


@pytest.mark.parametrize("time_unix", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_time_is_one_that_a_calendar_has(time_unix: float) -> None:
    with pytest.raises(WireError):
        wire.unpack_message(changed(fuzz_wire.hello(1), ("time_unix",), time_unix))


def test_a_rank_is_one_of_its_world() -> None:
    with pytest.raises(WireError, match="rank 1 of a run of 1"):
        wire.unpack_message(changed(fuzz_wire.hello(1), ("world_size",), 1))
    with pytest.raises(WireError):
        wire.unpack_message(changed(fuzz_wire.hello(1), ("world_size",), bounds.MAX_WORLD_SIZE + 1))
    wire.unpack_message(changed(fuzz_wire.hello(1), ("world_size",), bounds.MAX_WORLD_SIZE))


def test_a_layout_asks_for_no_more_memory_than_there_is() -> None:
    layout = tree(fuzz_wire.layout(1))
    column = layout["columns"][0] | {"history_len": bounds.MAX_HISTORY}
    wire.unpack_message(msgspec.msgpack.encode(layout | {"columns": [column] * 1000}))
    with pytest.raises(WireError, match="amax windows"):
        wire.unpack_message(msgspec.msgpack.encode(layout | {"columns": [column] * 1100}))


@pytest.mark.parametrize("change", [{"ranks": []}, {"ranks": [1, 1]}, {"ranks": [2, 1]}, {"scalars": []}])
def test_a_node_has_scalars_for_each_of_its_ranks_once(change: dict[str, Any]) -> None:
    frame = tree(fuzz_wire.node_frame(1, 7)) | {"ranks": [1, 2], "scalars": [{}, {}]}
    wire.unpack_uplink(msgspec.msgpack.encode(frame))
    with pytest.raises(WireError):
        wire.unpack_uplink(msgspec.msgpack.encode(frame | change))


def test_a_record_at_its_bounds_fits_the_file_store(tmp_path: Any) -> None:
    store = SqliteStore(tmp_path / "a.sqlite")
    frame = msgspec.structs.replace(
        fuzz_wire.frame(1, bounds.LARGEST_SENT), arrival=2**63 - 1, attempt=2**31 - 1, time_unix=1.0
    )
    store.append("r", [wire.unpack_stored(wire.pack(frame))])
    assert [item.step for item in store.read("r", records.StepFrame)] == [bounds.LARGEST_SENT]
    store.close()


@pytest.mark.parametrize("number", [2**53, 10**40, -(10**40)])
def test_a_policy_has_no_number_that_no_wire_carries(number: int) -> None:
    with pytest.raises(BadInput, match=r"2\^53"):
        parse(f"version: 1\nmode: auto\nhealthy_steps: {number}\nrules: []\n")


def test_the_memory_of_frames_that_wait_can_be_read_again() -> None:
    controller = ClusterController(MemoryStore(), clock=float)
    controller.take(msgspec.structs.replace(fuzz_wire.hello(0), world_size=2))
    controller.take(fuzz_wire.layout(0))
    controller.take(fuzz_wire.node_frame(0, 1))
    left = controller.memory("r")
    assert left is not None
    assert memory.VERSION
    successor = ClusterController(MemoryStore(), clock=float)
    successor.adopt("r", left, [])
    assert successor.pilot("r") is not None


def test_who_gives_a_node_too_long_a_name_learns_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "n" * (bounds.MAX_NAME_LENGTH + 1)
    result = CliRunner().invoke(agent_cli, ["--node", name])
    assert result.exit_code == 2
    assert str(bounds.MAX_NAME_LENGTH) in result.output
    monkeypatch.setenv("FP8WATCH_NODE", name)
    with pytest.raises(BadInput, match=r"FP8WATCH_NODE.*256"):
        from_environment()
    monkeypatch.setenv("FP8WATCH_NODE", name[1:])
    assert from_environment().node == name[1:]
