"""What the console reads: the right numbers, and no more of the store than it draws."""

from __future__ import annotations

import math
from contextlib import closing

import dashboard_runs as runs
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.columns import pack, unpack
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import ActionRecord, StepFrame
from fp8watch_dashboards import places, queries, timeline
from fp8watch_dashboards.headroom import headroom_log2
from fp8watch_dashboards.timeline import TimelineReader


class CountingStore(SqliteStore):
    """Counts the frames it hands out."""

    frames_read = 0

    def read(self, run, kind, first_step=0, last_step=None):
        for record in super().read(run, kind, first_step, last_step):
            self.frames_read += isinstance(record, StepFrame)
            yield record


def view_of(store, run):
    record = next(record for record in store.runs() if record.run == run)
    return queries.read_view(store, record, TimelineReader(run=run))


@pytest.fixture
def rescued(tmp_path):
    path = runs.write_rescued(tmp_path)
    with places.open_store(path) as store:
        yield view_of(store, "rescued-run")


def test_header_says_what_the_records_say(rescued):
    header = rescued.header
    assert (header.state, header.step, header.attempt, header.policy_mode) == ("running", 240, 1, "auto")
    assert header.loss == pytest.approx(runs.loss_at(240))
    assert (header.observed_modules, header.expected_modules, header.bf16_modules) == (15, 16, 1)
    assert header.open_actions == "1 only proposed"


def test_last_finite_loss_passes_over_nan(tmp_path):
    path = runs.write_healthy(tmp_path, steps=50)
    with places.open_store(path) as store:
        header = view_of(store, "healthy-run").header
    assert header.step == 50
    assert header.loss_step == 49
    assert header.loss == pytest.approx(runs.loss_at(49))


def test_steps_a_rollback_abandoned_do_not_survive(rescued):
    line = rescued.timeline
    assert line.first_step_of_attempt == {0: 1, 1: 141}
    abandoned = {(p.attempt, p.step) for p in line.points if not line.survives(p)}
    assert abandoned == {(0, step) for step in range(141, 171)}
    assert [point.step for point in line.surviving()] == list(range(1, 241))


def test_headroom_is_exact_and_unobserved_is_not_a_number(rescued):
    line = rescued.timeline
    names = [name for _, name in line.tensors]
    bad, unseen = names.index("blocks.2.mlp.down:input"), 0
    by_key = {(point.attempt, point.step): point for point in line.points}
    assert by_key[0, 160].headroom[bad] == pytest.approx(-6.0, abs=1e-5)
    assert math.isnan(by_key[0, 5].headroom[unseen])
    assert math.isfinite(by_key[0, 25].headroom[unseen])
    assert by_key[1, 200].in_bf16[bad]
    assert math.isnan(by_key[1, 200].headroom[bad])


def test_ranks_are_merged_by_module_name():
    """Rank 1 announces the tensors in reversed order and clips in the one that comes first there."""
    straight = runs.layout("r", num_blocks=1)
    turned = msgspec.structs.replace(straight, rank=1, columns=list(reversed(straight.columns)))
    count = len(straight.columns)
    headroom = np.full(count, 4.0)
    headroom[-1] = -2.0
    on_rank_1 = runs.frame("r", 1, num_blocks=1, loss=3.0, headroom=headroom)
    packed = {name: _reversed(column) for name, column in on_rank_1.columns.items()}
    store = MemoryStore()
    store.append("r", [runs.record("r", num_blocks=1), straight, turned])
    store.append("r", [runs.frame("r", 1, num_blocks=1, loss=1.0, headroom=4.0)])
    store.append("r", [msgspec.structs.replace(on_rank_1, rank=1, columns=packed)])
    (point,) = view_of(store, "r").timeline.points
    assert point.loss == pytest.approx(2.0)
    assert point.headroom == pytest.approx([4.0] * (count - 1) + [-2.0], abs=1e-5)


def _reversed(column):
    values, _ = unpack(column)
    return pack(values[::-1], column.dtype)


def test_a_hundred_thousand_frames_cost_what_is_drawn(tmp_path):
    run, steps = "long", 100_000
    template = runs.frame(run, 1, num_blocks=1, loss=2.0)
    with closing(CountingStore(tmp_path / "s.sqlite")) as store:
        store.append(run, [runs.record(run, num_blocks=1), runs.layout(run, num_blocks=1)])
        store.append(run, (msgspec.structs.replace(template, step=step) for step in range(1, steps + 1)))
        reader = TimelineReader(run=run)
        line = reader.read(store, 0, events=[54_321])
        assert (line.first_step, line.last_step, line.stride) == (1, steps, 128)
        assert {1, 54_321, steps - 1, steps} <= {point.step for point in line.points}
        assert len(line.points) < 1_200
        assert store.frames_read < 4_000
        store.frames_read = 0
        store.append(run, [msgspec.structs.replace(template, step=steps + 1)])
        assert reader.read(store, 0, events=[54_321]).last_step == steps + 1
        assert store.frames_read < 300


@pytest.mark.parametrize("kept_from", [1, 5_001, 8_000])
def test_a_pruned_run_and_a_rollback_on_a_grid_are_exact(tmp_path, kept_from):
    """Attempt 0 ends at 9,000, attempt 1 begins at 8,501: the grid's stride does not blur either."""
    run = "r"
    template = runs.frame(run, 1, num_blocks=1, loss=2.0)
    with closing(SqliteStore(tmp_path / "s.sqlite")) as store:
        store.append(run, [runs.record(run, attempt=1, num_blocks=1), runs.layout(run, num_blocks=1)])
        store.append(run, (msgspec.structs.replace(template, step=step) for step in range(kept_from, 9_001)))
        store.append(run, (msgspec.structs.replace(template, attempt=1, step=step) for step in range(8_501, 8_701)))
        view = view_of(store, run)
        assert view.timeline.first_step_of_attempt == {0: kept_from, 1: 8_501}
        assert (view.timeline.first_step, view.timeline.last_step) == (kept_from, 9_000)
        assert (view.header.step, view.header.attempt) == (8_700, 1)


def test_the_reader_forgets_what_a_new_attempt_repeats(tmp_path):
    run = "r"
    template = runs.frame(run, 1, num_blocks=1, loss=2.0)
    with closing(SqliteStore(tmp_path / "s.sqlite")) as store:
        store.append(run, [runs.record(run, num_blocks=1), runs.layout(run, num_blocks=1)])
        store.append(run, (msgspec.structs.replace(template, step=step) for step in range(1, 201)))
        reader = TimelineReader(run=run)
        assert {point.attempt for point in reader.read(store, 0).points} == {0}
        store.append(run, (msgspec.structs.replace(template, attempt=1, step=step) for step in range(101, 121)))
        line = reader.read(store, 1)
        assert [p.step for p in line.points if p.attempt == 1] == list(range(101, 121))
        store.append(run, (msgspec.structs.replace(template, attempt=1, step=step) for step in range(121, 206)))
        line = reader.read(store, 1)
        assert [p.step for p in line.points if p.attempt == 1] == list(range(101, 206))


def test_a_run_without_any_frame_is_shown_as_such():
    store = MemoryStore()
    store.append("r", [runs.record("r", num_blocks=1)])
    view = view_of(store, "r")
    assert view.timeline is timeline.EMPTY
    assert (view.header.step, view.header.loss) == (0, None)


@given(
    amax=st.floats(0, 2.0**100, width=32, allow_subnormal=False),
    scale=st.floats(2.0**-60, 2.0**60, width=32, allow_subnormal=False),
    fp8_max=st.sampled_from([448.0, 57344.0, 240.0]),
)
def test_headroom_is_negative_exactly_when_the_cast_clips(amax, scale, fp8_max):
    (value,) = headroom_log2(np.array([amax], "f4"), np.array([scale], "f4"), np.array([fp8_max]))
    assert not math.isnan(value)
    product = float(amax) * float(scale)
    if product > fp8_max * 1.000001:
        assert value < 0
    elif product < fp8_max * 0.999999:
        assert value > 0


@pytest.mark.parametrize(("amax", "scale"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (0.0, math.inf)])
def test_what_is_not_finite_has_no_headroom_at_all(amax, scale):
    assert headroom_log2(np.array([amax]), np.array([scale]), np.array([448.0]))[0] == -math.inf


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (None, "observe"),
        ("version: 1", "observe"),
        ("mode: approve", "approve"),
        ("a: [", "unreadable"),
        ("1", "unreadable"),
    ],
)
def test_policy_mode_is_read_from_the_policy(text, mode):
    assert queries.policy_mode(text) == mode


def test_a_damaged_endpoint_is_named_and_the_other_runs_stay(tmp_path):
    runs.write_healthy(tmp_path, steps=3)
    broken = tmp_path / "runs" / "broken" / "endpoint.json"
    broken.parent.mkdir()
    broken.write_text('{"store": 3}')
    listing = places.find_runs(tmp_path)
    assert [place.run for place in listing.places] == ["healthy-run"]
    assert str(broken) in listing.problems[0]


def test_looking_at_an_absent_store_makes_none(tmp_path):
    with pytest.raises(FileNotFoundError), places.open_store(tmp_path / "none.sqlite"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_evidence_is_short_and_keeps_numbers():
    text = queries.evidence_text({"ratio": 0.123456, "ids": [1, 2, 3, 4, 5], "who": "x", "none": None})
    assert text == "ratio 0.1235, ids [1, 2, 3, ... 5 in all], who x, none null"


def test_the_head_says_what_waits_and_what_is_only_proposed(tmp_path):
    path = runs.write_healthy(tmp_path, steps=50)
    with places.open_store(path) as store:
        record = next(iter(store.runs()))
    record = msgspec.structs.replace(record, state="running")
    common = {
        "run": record.run, "attempt": 0, "action": "rollback", "params": {"checkpoint_step": 20}, "rule": "x",
        "finding": "f", "incident": "i", "mode": "approve", "decided_step": 30,
    }  # fmt: skip
    waiting = ActionRecord(id="w", status="waiting", expires_step=90, **common)
    other = ActionRecord(id="v", status="waiting", **common)
    proposed = ActionRecord(id="p", status="proposed", **common)
    text = queries.open_actions_text([waiting, proposed], record)
    assert text == "1 action waits for a person (`fp8watch actions approve w`); 1 only proposed"
    assert queries.open_actions_text([waiting, other], record).startswith("2 actions wait for a person (`fp8watch ")
    assert queries.open_actions_text([proposed], record) == "1 only proposed"
    assert queries.open_actions_text([], record) == ""
    ended = msgspec.structs.replace(record, state="ended")
    assert "waits" not in queries.open_actions_text([waiting], ended)
    (row,) = queries.action_rows([waiting], now=50)
    assert row["what became of it"] == "waiting until step 90 (30 steps would be lost now)"
