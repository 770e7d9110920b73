"""One suite for every store: what is written is read, replaced by identity, pruned by the retention rules."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_servers import REDIS_KINDS

from fp8watch.controller.stores.base import Approval, Store
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import BadInput
from fp8watch.records import ActionRecord, CheckpointRecord, Column, Finding, Hello, RunRecord, StepFrame


def frame(step: int, *, attempt: int = 0, rank: int = 0, **scalars: float) -> StepFrame:
    return StepFrame(
        run="r", attempt=attempt, rank=rank, step=step, layout_id=0, time_unix=1.0, scalars=scalars,
        columns={"amax": Column(dtype="f4", data=b"\0" * 8, valid=b"\x01")},
    )  # fmt: skip


def finding(step: int, name: str = "f1") -> Finding:
    return Finding(
        id=name, run="r", attempt=0, step=step, onset_step=step, detector="stuck", severity="act", cause="unknown"
    )


def action(name: str, **changes: object) -> ActionRecord:
    fields: dict[str, object] = {
        "id": name, "run": "r", "attempt": 0, "action": "halt", "params": {}, "rule": "x", "finding": "f1",
        "decided_step": 5,
    }  # fmt: skip
    return ActionRecord(**(fields | changes))  # type: ignore[arg-type]


def run_record(state: str = "running", started: float = 1.0, run: str = "r") -> RunRecord:
    hello = Hello(
        wire_version=1, run=run, attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=1.0, step=0
    )
    return RunRecord(run=run, state=state, hello=hello, started_unix=started, updated_unix=2.0)  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "sqlite", *(pytest.param(kind, marks=pytest.mark.redis) for kind in REDIS_KINDS)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened: Store
    if request.param in REDIS_KINDS:
        opened = request.getfixturevalue("empty_redis")(request.param)
    else:
        opened = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "deep" / "store.sqlite")
    with contextlib.closing(opened):
        yield opened


def test_frames_come_back_in_order_and_by_step(store: Store) -> None:
    store.append("r", [frame(step, loss=float(step)) for step in range(1, 11)])
    assert [item.step for item in store.read("r", StepFrame)] == list(range(1, 11))
    assert [item.step for item in store.read("r", StepFrame, 4, 6)] == [4, 5, 6]
    assert [item.step for item in store.read("r", StepFrame, 9)] == [9, 10]
    assert list(store.read("other", StepFrame)) == []


def test_attempts_and_ranks_are_kept_apart(store: Store) -> None:
    store.append("r", [frame(3), frame(3, attempt=1), frame(3, rank=1), frame(3)])
    assert sorted((item.attempt, item.rank) for item in store.read("r", StepFrame)) == [(0, 0), (0, 1), (1, 0)]


def test_a_later_record_of_the_same_identity_replaces_in_its_place(store: Store) -> None:
    store.append("r", [action("a1"), action("a2")])
    store.append("r", [action("a1", status="applied")])
    assert [(item.id, item.status) for item in store.read("r", ActionRecord)] == [("a1", "applied"), ("a2", "proposed")]
    saved = CheckpointRecord(run="r", attempt=0, checkpoint="c", step=5, path="/c", label="pending")
    store.append("r", [saved])
    store.append("r", [CheckpointRecord(run="r", attempt=0, checkpoint="c", step=5, path="/c", label="good")])
    assert [item.label for item in store.read("r", CheckpointRecord)] == ["good"]


def test_runs_are_listed_once_with_their_newest_state(store: Store) -> None:
    store.append("r", [run_record()])
    store.append("s", [run_record(started=5.0, run="s")])
    store.append("r", [run_record("ended")])
    assert [(item.run, item.state) for item in store.runs()] == [("r", "ended"), ("s", "running")]


def test_the_newest_verdict_counts(store: Store) -> None:
    store.approve(Approval(run="r", action_id="a1", verdict="approve"))
    store.approve(Approval(run="r", action_id="a1", verdict="refuse"))
    store.approve(Approval(run="s", action_id="a1", verdict="approve"))
    assert [item.verdict for item in store.approvals("r")] == ["refuse"]


def test_nan_and_infinity_survive(store: Store) -> None:
    store.append("r", [frame(1, loss=math.nan, grad_norm=math.inf)])
    (read,) = store.read("r", StepFrame)
    assert math.isnan(read.scalars["loss"])
    assert read.scalars["grad_norm"] == math.inf


scalars = st.dictionaries(st.text(max_size=6), st.floats(allow_nan=False), max_size=4)
frames = st.builds(
    StepFrame,
    run=st.just("r"), attempt=st.integers(0, 2), rank=st.integers(0, 2), step=st.integers(1, 50),
    layout_id=st.integers(0, 3), time_unix=st.floats(0, 2e9), scalars=scalars,
    columns=st.dictionaries(
        st.text(max_size=6),
        st.builds(
            Column, dtype=st.just("u1"), data=st.binary(max_size=16), valid=st.none() | st.binary(max_size=2)
        ),
        max_size=2,
    ),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(frames, max_size=12))
def test_any_frames_make_the_round_trip(written: list[StepFrame]) -> None:
    with contextlib.closing(SqliteStore(":memory:")) as store:
        store.append("r", written)
        expected = {(item.attempt, item.rank, item.step): item for item in written}
        read = list(store.read("r", StepFrame))
        assert {(item.attempt, item.rank, item.step): item for item in read} == expected
        assert len(read) == len(expected)


# What only the file does


def open_file(path: Path, **options: object) -> contextlib.closing[SqliteStore]:
    return contextlib.closing(SqliteStore(path, **options))  # type: ignore[arg-type]


def test_it_is_there_after_a_restart_and_readable_while_written(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with open_file(path) as writer:
        writer.append("r", [run_record(), frame(1, loss=1.0)])
        with open_file(path, read_only=True) as reader:
            assert [item.step for item in reader.read("r", StepFrame)] == [1]
            writer.append("r", [frame(2, loss=1.0)])
            assert [item.step for item in reader.read("r", StepFrame)] == [1, 2]
            with pytest.raises(sqlite3.OperationalError):
                reader.append("r", [frame(3)])
    with open_file(path) as again:
        assert [item.step for item in again.read("r", StepFrame)] == [1, 2]


def test_appending_is_all_or_nothing(tmp_path: Path) -> None:
    def records() -> Iterator[StepFrame]:
        yield frame(1)
        raise OSError("no space left on device")

    with open_file(tmp_path / "s.sqlite") as store:
        with pytest.raises(OSError, match="no space"):
            store.append("r", records())
        assert list(store.read("r", StepFrame)) == []
        store.append("r", [frame(2)])
        assert [item.step for item in store.read("r", StepFrame)] == [2]


def test_old_frames_go_but_not_around_incidents(tmp_path: Path) -> None:
    with open_file(tmp_path / "s.sqlite", full_steps=100) as store:
        store.append("r", [frame(step) for step in range(1, 2001)])
        store.append("r", [finding(800)])
        dropped = store.prune("r")
        kept = [item.step for item in store.read("r", StepFrame)]
        assert kept == [*range(800 - 256, 800 + 257), *range(1901, 2001)]
        assert dropped == 2000 - len(kept)
        assert len(list(store.read("r", Finding))) == 1


def test_over_the_cap_the_oldest_frames_go_and_never_a_decision(tmp_path: Path) -> None:
    with open_file(tmp_path / "s.sqlite", limit_bytes=1024 * 1024) as store:
        big = Column(dtype="u1", data=bytes(4096))
        store.append("r", [action("a1"), finding(1)])
        store.append(
            "r",
            [
                StepFrame(
                    run="r", attempt=0, rank=0, step=step, layout_id=0, time_unix=0, scalars={}, columns={"x": big}
                )
                for step in range(1, 1001)
            ],
        )
        assert store.size_bytes() > 1024 * 1024
        assert store.prune("r") > 0
        assert store.size_bytes() <= 1024 * 1024
        kept = [item.step for item in store.read("r", StepFrame)]
        assert kept == list(range(kept[0], 1001))
        assert kept
        assert len(list(store.read("r", ActionRecord))) == len(list(store.read("r", Finding))) == 1


def test_a_newer_schema_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with open_file(path):
        pass
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version=99")
        raw.commit()
    with pytest.raises(BadInput, match="schema 99 is newer"):
        SqliteStore(path)
    other = tmp_path / "t.sqlite"
    other.write_bytes(b"no database at all, just text that is long enough" * 50)
    with pytest.raises(sqlite3.DatabaseError):
        SqliteStore(other)


def test_a_damaged_record_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with open_file(path) as store:
        store.append("r", [frame(1), frame(2), frame(3)])
        store._db.execute("UPDATE frames SET body = x'00ff' WHERE step = 2")
        assert [item.step for item in store.read("r", StepFrame)] == [1, 3]
