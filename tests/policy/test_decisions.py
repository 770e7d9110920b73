"""The decision itself: targets of a rollback, budgets, and what must hold in any run."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch.policy import events, load
from fp8watch.policy.budgets import Spent, refusal
from fp8watch.policy.decide import decide
from fp8watch.policy.load import parse
from fp8watch.policy.match import matches
from fp8watch.policy.rungs import Rollback
from fp8watch.policy.schema import Budgets, When
from fp8watch.policy.state import InForce, PolicyState, Track
from fp8watch.policy.target import choose_target
from fp8watch.policy.view import Trouble, View
from fp8watch.records import DETECTORS, CheckpointRecord

LABELS = ("pending", "candidate", "good", "tainted")
checkpoints = st.lists(
    st.builds(
        CheckpointRecord,
        run=st.just("r"), attempt=st.just(0), checkpoint=st.uuids().map(str), step=st.integers(0, 200),
        path=st.sampled_from(["/c", ""]), label=st.sampled_from(LABELS), has_data_position=st.booleans(),
    ),
    max_size=8,
)  # fmt: skip


@given(checkpoints, st.integers(1, 200), st.integers(0, 50), st.booleans(), st.booleans())
def test_a_rollback_goes_to_the_newest_good_one_before_the_onset_or_nowhere(
    saved: list[CheckpointRecord], onset: int, margin: int, accept: bool, candidates: bool
) -> None:
    # case: SPK-02
    rung = Rollback(
        action="rollback", margin_steps=margin, if_data_position_missing="accept" if accept else "refuse",
        if_none_is_good="candidate" if candidates else "refuse",
    )  # fmt: skip
    used = {saved[0].checkpoint: 1} if saved else {}
    target = choose_target(saved, onset_step=onset, rung=rung, used=used, per_checkpoint=1)
    sound = [
        record
        for record in saved
        if record.step < onset - margin
        and record.label in {"good", "candidate"}
        and record.path  # not rotated away
        and (accept or record.has_data_position)
        and record.checkpoint not in used
    ]
    good = [record for record in sound if record.label == "good"]
    fit = good or (sound if candidates else [])
    assert target.reason
    if not fit:
        assert target.checkpoint is None
        assert "nothing to roll back to" in target.reason
    else:
        assert target.checkpoint in fit
        assert target.checkpoint.step == max(record.step for record in fit)  # type: ignore[union-attr]


def test_budgets_count_what_was_applied_and_forget_what_is_long_ago() -> None:
    budgets = Budgets(actions_per_1000_steps=2, rollbacks_per_24h=1)
    spent = Spent().after("hold_lr", seen=10, time_unix=0.0).after("rollback", seen=20, time_unix=0.0, checkpoint="c")
    assert spent.per_checkpoint == {"c": 1}
    assert "2 of 2 actions" in (refusal(budgets, spent, "bf16_all", seen=30, time_unix=1.0) or "")
    assert refusal(budgets, spent, "halt", seen=30, time_unix=1.0) is None
    assert refusal(budgets, spent, "bf16_all", seen=1011, time_unix=1.0) is None
    assert "1 of 1 rollbacks" in (refusal(budgets, spent, "rollback", seen=2000, time_unix=1.0) or "")
    assert refusal(budgets, spent, "rollback", seen=2000, time_unix=86_401.0) is None


def test_zero_budgets_mean_never() -> None:
    # case: SPK-25
    none = Budgets(actions_per_1000_steps=0, rollbacks_per_24h=0)
    assert refusal(none, Spent(), "hold_lr", seen=0, time_unix=0.0) is not None
    only_rollbacks = Budgets(rollbacks_per_24h=0)
    assert refusal(only_rollbacks, Spent(), "rollback", seen=0, time_unix=0.0) is not None
    assert refusal(only_rollbacks, Spent(), "hold_lr", seen=0, time_unix=0.0) is None


def trouble(**changes: object) -> Trouble:
    fields: dict[str, object] = {
        "incident": "i1", "detector": "loss_spike", "cause": "unknown", "severity": "act", "onset_step": 50,
        "first_step": 52, "last_seen_step": 55,
    }  # fmt: skip
    return Trouble(**(fields | changes))  # type: ignore[arg-type]


def test_every_condition_of_a_rule_has_to_hold() -> None:
    view = View(run="r", step=55, seen=55, warmup_steps=45)
    here = trouble(tensors=("a:grad_output",))
    assert matches(When(detector=("loss_spike",)), here, view)
    assert not matches(When(detector=("stuck",)), here, view)
    assert not matches(When(detector=("loss_spike",)), trouble(severity="warn"), view)
    assert matches(When(detector=("loss_spike",), severity="warn"), here, view)
    assert not matches(When(detector=("loss_spike",), cause=("data",)), here, view)
    assert matches(When(detector=("loss_spike",), tensor=("grad_output",)), here, view)
    assert not matches(When(detector=("loss_spike",), tensor=("weight",)), here, view)
    assert matches(When(detector=("loss_spike",), for_steps=4), here, view)
    assert not matches(When(detector=("loss_spike",), for_steps=5), here, view)
    assert matches(When(detector=("loss_spike",), near_warmup_steps=5), here, view)
    assert not matches(When(detector=("loss_spike",), near_warmup_steps=4), here, view)
    unknown = View(run="r", step=55, seen=55)
    assert not matches(When(detector=("loss_spike",), near_warmup_steps=5), here, unknown)
    assert not matches(When(detector=("loss_spike",), params_nonfinite=True), here, view)


def test_the_excess_of_the_loss_is_measured_against_what_was_before_the_onset() -> None:
    losses = [(step, 2.0 if step < 50 else 2.2) for step in range(1, 60)]
    view = View(run="r", step=59, seen=59, losses=tuple(losses))
    excess = view.loss_excess(50)
    assert excess is not None
    assert math.isclose(excess, 0.1, abs_tol=1e-9)
    assert View(run="r", step=59, seen=59).loss_excess(50) is None, "unknown is not zero"
    broken = View(run="r", step=59, seen=59, losses=(*losses, (60, math.nan)))
    assert broken.loss_excess(50) == math.inf


happenings = st.lists(
    st.tuples(
        st.sampled_from(DETECTORS[:11]),
        st.sampled_from(("precision", "optimisation", "data", "hardware", "bookkeeping", "unknown")),
        st.integers(1, 120),
        st.integers(1, 40),
        st.sampled_from(((), ("a",), ("a", "b"))),
    ),
    max_size=6,
)


# case: SPK-05
@settings(max_examples=40, deadline=None)
@given(happenings, st.lists(st.booleans(), min_size=20, max_size=20))
def test_whatever_happens_one_command_at_a_time_and_never_in_a_settling_window(
    events_of_run: list[tuple[str, str, int, int, tuple[str, ...]]], works: list[bool]
) -> None:
    policy = load("auto")
    state = PolicyState()
    is_working = iter(works * 20)
    quiet_until = 0
    sent = 0
    for step in range(1, 160):
        troubles = tuple(
            trouble(
                incident=f"i{number}", detector=detector, cause=cause, onset_step=start, first_step=start,
                last_seen_step=min(step, start + length), layers=layers,
            )
            for number, (detector, cause, start, length, layers) in enumerate(events_of_run)
            if start <= step <= start + length + 20
        )  # fmt: skip
        view = View(
            run="r", step=step, seen=step, troubles=troubles, modules=("a", "b", "c", "d"),
            tensors=("a:input", "b:input"), grad_norm_median=1.0,
        )  # fmt: skip
        before = state
        state, decisions = decide(policy, state, view)
        again, repeated = decide(policy, before, view)
        assert (again, repeated) == (state, decisions), "the same question has the same answer"
        commands = [item for item in decisions if item.kind in {"apply", "revert"}]
        assert len(commands) <= 1
        for command in commands:
            assert command.kind == "revert" or step >= quiet_until
            sent += command.kind == "apply"
            if command.kind == "revert":
                state = events.reverted(state, view, command.action_id, ok=True)
            elif next(is_working):
                state = events.applied(policy, state, view, command.action_id)
                assert command.rung is not None
                quiet_until = step + command.rung.settle_steps
            else:
                state = events.failed(policy, state, command.action_id, "did not work")
        ids = [item.action_id for item in decisions if item.kind in {"apply", "propose", "wait", "record"}]
        assert len(ids) == len(set(ids))
    assert sum(at > 0 for at in state.spent.actions) <= policy.budgets.actions_per_1000_steps


def test_what_had_no_effect_while_another_command_was_on_its_way_is_undone_after_it() -> None:
    policy = parse("version: 1\nmode: auto\nrules:\n  - name: r\n    when: {detector: saturation}\n    ladder:\n"
                   "      - {action: raise_margin}\n      - {action: tighten_clip, max_norm: 1.0}\n")  # fmt: skip
    wrong = trouble(incident="i", detector="saturation", onset_step=5, first_step=5, last_seen_step=30)
    track = Track(
        trouble=wrong, rule="r", attempt=0, phase="settling", action_id="a", action="raise_margin", judge_at=30
    )
    held = InForce(action_id="a", action="raise_margin", rule="r", params={})
    state = PolicyState(tracks=(track,), in_force=(held,))
    state, decisions = decide(policy, state, View(run="r", step=30, seen=30, troubles=(wrong,), is_busy=True))
    assert [(item.kind, item.outcome) for item in decisions] == [("verdict", "no_effect")]
    state, decisions = decide(policy, state, View(run="r", step=31, seen=31, troubles=(wrong,)))
    assert [(item.kind, item.action_id) for item in decisions] == [("revert", "a")]
    state = events.reverted(state, View(run="r", step=32, seen=32), "a", ok=True)
    assert state.in_force == ()
    assert state.leftovers == ()
