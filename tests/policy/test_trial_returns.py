"""Trial returns of a hold: when they wait, and what a failed one leads to, wherever the ladder stands by then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_policy_rules import Run, kinds, ladder, reasons, trouble

from fp8watch.policy import events
from fp8watch.policy.state import InForce, PolicyState
from fp8watch.policy.view import View

LEVEL = "action: hold_lr, settle_steps: 4, hold_steps: 10"


def rates(run: Run, scheduled: float, *, held: float | None = None) -> tuple[tuple[int, float, float], ...]:
    """(step, LR in force, our factor) of 20 sound steps at 1e-3 and the newest step at what the schedule asks for."""
    lr = scheduled if held is None else min(scheduled, held)
    return (*((step, 1e-3, 1.0) for step in range(run.step - 20, run.step)), (run.step, lr, lr / scheduled))


def held_after_a_jump(text: str) -> Run:
    """A run whose LR has jumped to 0.3 and is held at 1e-3; the trouble is gone."""
    run = Run(text)
    (made,) = run.go([trouble()], learning_rates=rates(run, 0.3))
    assert made.params == {"to_lr": pytest.approx(1e-3)}
    return run


def test_a_held_level_is_not_let_go_while_the_schedule_is_above_it() -> None:
    run = held_after_a_jump(ladder(LEVEL))
    made = run.go(steps=400, learning_rates=rates(run, 0.3, held=1e-3))
    assert ("revert", "hold_lr") not in kinds(made)
    assert reasons(made) == ["the hold is over, but the schedule asks for 0.3: held at 0.001 until it is back"], "once"
    made = run.go(steps=3, learning_rates=rates(run, 1e-3, held=1e-3))
    assert kinds(made) == [("revert", "hold_lr")], "the schedule is back"


@pytest.mark.parametrize("observed", [(), ((1, float("nan"), 1.0),), ((1, 1e-3, 0.0),)])
def test_a_hold_is_let_go_in_time_where_the_schedule_is_not_observed(observed: Any) -> None:
    run = held_after_a_jump(ladder(LEVEL))
    assert ("revert", "hold_lr") in kinds(run.go(steps=14, learning_rates=observed))


def test_a_hold_by_a_factor_is_let_go_in_time_whatever_the_schedule_does() -> None:
    run = Run(ladder(f"{LEVEL}, factor: 0.5"))
    run.go([trouble()])
    assert ("revert", "hold_lr") in kinds(run.go(steps=14, learning_rates=rates(run, 0.3)))


def test_a_hold_that_waits_does_not_keep_others_from_their_return() -> None:
    run = held_after_a_jump(ladder(LEVEL))
    run.go(steps=20, learning_rates=rates(run, 0.3, held=1e-3))
    other = InForce(action_id="x", action="raise_margin", rule="b", params={}, until_seen=run.step)
    run.state = PolicyState(tracks=run.state.tracks, in_force=(*run.state.in_force, other), next_number=9)
    assert kinds(run.go(learning_rates=rates(run, 0.3, held=1e-3))) == [("revert", "raise_margin")]


HURT = tuple((step, 2.0 if step < 10 else 3.0) for step in range(1, 40))
THEN_BACK = ladder(LEVEL, "action: tighten_clip, max_norm: 1.0, settle_steps: 4, if_loss_above: 0.1")


@pytest.mark.parametrize("losses", [(), HURT])
def test_a_failed_return_is_held_longer_also_where_the_ladder_had_gone_on(losses: Any) -> None:
    run = held_after_a_jump(THEN_BACK)
    low = {"learning_rates": rates(run, 1e-3, held=1e-3)}
    made = run.go(steps=25, losses=losses, **low)
    assert (("apply", "tighten_clip") in kinds(made)) is bool(losses), "the ladder has gone on, or has not"
    assert kinds(made)[-1] == ("revert", "hold_lr")
    again = trouble(incident="i2", onset_step=run.step, first_step=run.step)
    (order,) = (item for item in run.go([again], learning_rates=rates(run, 0.3)) if item.kind == "apply")
    assert order.action == "hold_lr"
    assert order.params == {"to_lr": pytest.approx(1e-3)}
    assert "after hold_lr was given back" in order.reason
    begun = run.step
    run.go(steps=60, **low)
    (returned,) = (step for step, item in run.log if item.kind == "revert" and step > begun)
    assert returned == begun + 1 + 20, "twice as long as the first time"


def test_trouble_after_our_return_takes_the_level_of_the_hold_not_that_of_the_steps_after_it() -> None:
    run = held_after_a_jump(ladder(LEVEL))
    run.go(steps=20)  # the schedule is not observed: given back in time, and the LR is wrong still
    wrong = tuple((step, 0.3, 1.0) for step in range(run.step - 40, run.step + 1))
    again = trouble(incident="i2", onset_step=run.step, first_step=run.step)
    (order,) = (item for item in run.go([again], learning_rates=wrong) if item.kind == "apply")
    assert order.params == {"to_lr": pytest.approx(1e-3)}
    assert "held at 0.001 until our return" in order.reason


def test_a_level_is_not_taken_again_where_the_schedule_is_at_it_or_long_after_the_return() -> None:
    for later, lr in ((0, 1e-3), (250, 0.3)):
        run = held_after_a_jump(ladder(LEVEL))
        run.go(steps=20 + later)
        level = tuple((step, lr, 1.0) for step in range(run.step - 40, run.step + 1))
        again = trouble(incident="i2", onset_step=run.step, first_step=run.step)
        (order,) = (item for item in run.go([again], learning_rates=level) if item.kind == "apply")
        assert order.params == {"factor": 0.5}, (later, lr)


def test_another_rule_that_begins_with_the_same_action_holds_longer_too() -> None:
    second = "  - name: b\n    when: {detector: divergence}\n    ladder:\n      - {FIRST}\n      - {action: halt}\n"
    for first, wanted in ((LEVEL, "hold_lr"), ("action: rewarm, settle_steps: 4", "rewarm")):
        run = held_after_a_jump(ladder(LEVEL) + second.replace("FIRST", first))
        run.go(steps=20)
        again = trouble(incident="i2", detector="divergence", onset_step=run.step, first_step=run.step)
        made = run.go([again], learning_rates=rates(run, 0.3))
        assert kinds(made) == [("apply", wanted)]
        begun = run.step
        run.go(steps=60)
        if wanted == "hold_lr":
            assert [step for step, item in run.log if item.kind == "revert"][-1] == begun + 1 + 20


def test_nothing_is_given_back_before_the_replay_of_a_rollback_has_passed_the_onset() -> None:
    """The schedule is sound in the replayed steps, and jumps again at their end."""
    run = held_after_a_jump(ladder(LEVEL, "action: rollback, settle_steps: 4, if_loss_above: 0.1"))
    (track,) = run.state.tracks
    run.go(steps=2)
    (held,) = run.state.in_force
    sent = {"checkpoint": "c", "checkpoint_step": 0, "onset_step": 60}
    rolled = replace(track, phase="sent", rung=1, action="rollback", action_id="r-1.0002", params=sent)
    run.state = replace(run.state.with_track(rolled), in_force=(replace(held, until_seen=run.step),))
    now = View(run="r", step=run.step, seen=run.step)
    run.state = events.applied(run.policy, run.state, now, "r-1.0002")
    assert ("revert", "hold_lr") not in kinds(run.go(steps=60)), "block_until is long over"
    assert ("revert", "hold_lr") in kinds(run.go(steps=8))


def test_only_the_layer_that_failed_is_held_longer_and_only_as_much_as_one_return_asks_for() -> None:
    rung = "action: bf16_layers, settle_steps: 4, hold_steps: 10"
    run = Run(ladder(rung, when="detector: crest"))
    layers = ("a", "b", "c")
    names = {"modules": tuple("abcdefghijklmnopqrstuvwxyz"), "tensors": ("a:input", "b:input", "c:input")}
    run.go([trouble(detector="crest", layers=layers, tensors=names["tensors"])], **names)
    run.go(steps=60, **names)
    assert [item.params["layers"] for _, item in run.log if item.kind == "revert"] == [["c"], ["b"], ["a"]]
    again = trouble(incident="i2", detector="crest", layers=("b",), onset_step=run.step, first_step=run.step)
    assert kinds(run.go([again], **names)) == [("apply", "bf16_layers")]
    begun = run.step
    run.go(steps=60, **names)
    assert [step for step, item in run.log if item.kind == "revert"][-1] == begun + 1 + 20, "2 times, not 8"


def test_trouble_under_the_second_hold_moves_up_the_ladder() -> None:
    run = held_after_a_jump(THEN_BACK)
    run.go(steps=20)
    run.go([trouble(incident="i2", onset_step=run.step, first_step=run.step)], learning_rates=rates(run, 0.3))
    run.go(steps=8)
    made = run.go([trouble(incident="i3", onset_step=run.step, first_step=run.step)])
    assert kinds(made) == [("apply", "tighten_clip")], "it is in force, and was not given back a second time"


def test_the_same_incident_seen_again_after_the_return_is_held_again() -> None:
    run = held_after_a_jump(ladder(LEVEL, "action: halt"))
    run.go(steps=20)
    assert kinds(run.go([trouble()], learning_rates=rates(run, 0.3))) == [("apply", "hold_lr")]


def test_what_was_undone_for_lack_of_effect_was_not_given_back() -> None:
    run = Run(ladder("action: hold_lr, factor: 0.5, settle_steps: 4", "action: rewarm, settle_steps: 4"))
    made = run.go([trouble()], steps=8)
    made += run.go(steps=20)
    assert kinds(made)[-1] == ("verdict", "rewarm")
    assert ("revert", "hold_lr") in kinds(made)
    again = run.go([trouble(incident="i2", onset_step=run.step, first_step=run.step)], steps=2)
    assert ("apply", "hold_lr") not in kinds(again)


NEXT = ladder("action: hold_lr, settle_steps: 4{HOLD}", "action: tighten_clip, max_norm: 1.0, settle_steps: 4")


@pytest.mark.parametrize("hold", ["", ", hold_steps: 10"])
def test_a_level_without_effect_is_kept_while_its_schedule_is_wrong_and_the_ladder_goes_on(hold: str) -> None:
    """To let it go would put the jumped rate in force on top of the trouble that it has not mended."""
    run = held_after_a_jump(NEXT.replace("{HOLD}", hold))
    wrong = {"learning_rates": rates(run, 0.3, held=1e-3)}
    made = run.go([trouble()], steps=8, **wrong)
    assert kinds(made) == [("verdict", "hold_lr"), ("apply", "tighten_clip")]
    assert "the schedule asks for 0.3: held at 0.001 until it is back" in reasons(made)[-1]
    made = run.go(steps=100, **wrong)
    assert ("revert", "hold_lr") not in kinds(made)
    assert kinds(run.go(steps=3, learning_rates=rates(run, 1e-3, held=1e-3))) == [("revert", "hold_lr")]


def test_a_level_without_effect_is_undone_where_its_schedule_is_back() -> None:
    run = held_after_a_jump(NEXT.replace("{HOLD}", ""))
    made = run.go([trouble()], steps=8, learning_rates=rates(run, 1e-3, held=1e-3))
    assert kinds(made) == [("verdict", "hold_lr"), ("revert", "hold_lr"), ("apply", "tighten_clip")]


def test_a_level_that_another_command_keeps_from_being_undone_is_kept_too_while_its_schedule_is_wrong() -> None:
    run = held_after_a_jump(NEXT.replace("{HOLD}", ""))
    wrong = {"learning_rates": rates(run, 0.3, held=1e-3)}
    made = run.go([trouble()], steps=6, is_busy=True, **wrong)
    made += run.go([trouble()], steps=6, **wrong)
    assert ("verdict", "hold_lr") in kinds(made)
    assert ("revert", "hold_lr") not in kinds(made)
