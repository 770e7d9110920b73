"""Whatever happens in mode approve: no question twice at a time, one answer for all whom it concerns, one command."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch.policy import events, load
from fp8watch.policy.decide import decide
from fp8watch.policy.load import parse
from fp8watch.policy.state import PolicyState
from fp8watch.policy.view import Trouble, View
from fp8watch.records import DETECTORS, CheckpointRecord

SAVED = CheckpointRecord(
    run="r", attempt=0, checkpoint="c", step=1, path="/c", label="good", has_data_position=True
)  # fmt: skip
happenings = st.lists(
    st.tuples(
        st.sampled_from(DETECTORS[:11]),
        st.sampled_from(("precision", "optimisation", "data", "hardware", "bookkeeping", "unknown")),
        st.integers(2, 60),
        st.integers(1, 60),
        st.sampled_from(((), ("a",), ("a", "b"))),
        st.sampled_from((None, 3)),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(happenings, st.lists(st.sampled_from(("approve", "refuse", "")), min_size=20, max_size=20), st.data())
def test_no_question_twice_at_a_time_and_one_answer_for_all(
    events_of_run: list[tuple[str, str, int, int, tuple[str, ...], int | None]], answers: list[str], data: st.DataObject
) -> None:
    policy = load("auto").model_copy(update={"mode": "approve"})
    state, verdicts = PolicyState(), {}
    answer = iter(answers * 30)
    for step in range(1, 160):
        troubles = tuple(
            Trouble(
                incident=f"i{number}", detector=detector, cause=cause, severity="act", onset_step=start,  # type: ignore[arg-type]
                first_step=start, last_seen_step=min(step, start + length), layers=layers, rank=rank,
            )
            for number, (detector, cause, start, length, layers, rank) in enumerate(events_of_run)
            if start <= step <= start + length + 20
        )  # fmt: skip
        view = View(
            run="r", step=step, seen=step, troubles=troubles, modules=("a", "b", "c", "d"), checkpoints=(SAVED,),
            tensors=("a:input", "b:input"), grad_norm_median=1.0, verdicts=dict(verdicts),
        )  # fmt: skip
        state, decisions = decide(policy, state, view)
        asked = {track.action_id for track in state.tracks if track.phase == "waiting"}
        shown = [
            json.dumps([track.action, track.trouble.rank, dict(track.params)], sort_keys=True)
            for track in state.tracks
            if track.phase == "waiting" and not track.asked_for
        ]
        assert max(Counter(shown).values(), default=1) == 1, "the same question twice"
        for name in asked:
            assert state.tracks_of(name, "waiting")[0].asked_for == "", "every question is somebody's"
            if name not in verdicts and (given_now := next(answer)):
                verdicts[name] = given_now
        commands = [item for item in decisions if item.kind in {"apply", "revert"}]
        assert len(commands) <= 1
        for command in commands:
            sharing = len(state.tracks_of(command.action_id, "sent"))
            if command.kind == "revert":
                state = events.reverted(state, view, command.action_id, ok=True)
            elif data.draw(st.booleans()):
                state = events.applied(policy, state, view, command.action_id)
                assert len(state.tracks_of(command.action_id, "settling")) == sharing
                assert sum(item.action_id == command.action_id for item in state.in_force) <= 1
            else:
                state = events.failed(policy, state, command.action_id, "did not work")
            assert not [track for track in state.tracks if track.phase == "sent"]
        assert not [track for track in state.tracks if track.phase == "undoing"] or commands


GROWING = """version: 1
mode: approve
rules:
  - name: serious
    when: {detector: loss_spike, severity: act}
    ladder: [{action: halt}]
  - name: early
    when: {detector: loss_spike, severity: warn}
    ladder: [{action: hold_lr, factor: 0.5}]
  - name: updates
    when: {detector: update_rms, severity: act}
    ladder: [{action: hold_lr, factor: 0.5}]
"""


@pytest.mark.parametrize("first", ["loss_spike", "update_rms"])
def test_what_has_grown_leaves_the_question_and_the_other_is_not_forgotten(first: str) -> None:
    policy, state = parse(GROWING), PolicyState()
    begin = {"loss_spike": 10, "update_rms": 10} | {first: 8}
    records = []
    for step in range(8, 20):
        troubles = tuple(
            Trouble(
                incident=name, detector=name, cause="unknown", onset_step=start, first_step=start, last_seen_step=step,
                severity="warn" if name == "loss_spike" and step < 15 else "act",
            )
            for name, start in begin.items()
            if step >= start
        )  # fmt: skip
        state, decisions = decide(policy, state, View(run="r", step=step, seen=step, troubles=troubles))
        records += [(item.action_id, item.status) for item in decisions if item.kind == "record"]
        if step == 12:
            (asked,) = {track.action_id for track in state.tracks}
            assert {track.asked_for for track in state.tracks} == {"", first}
    waiting = {track.trouble.incident: track for track in state.tracks if track.phase == "waiting"}
    assert {name: track.action for name, track in waiting.items()} == {"loss_spike": "halt", "update_rms": "hold_lr"}
    assert all(not track.asked_for for track in waiting.values())
    assert records == ([(asked, "expired")] if first == "loss_spike" else [])
    assert (waiting["update_rms"].action_id == asked) is (first == "update_rms")
