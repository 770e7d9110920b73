"""What is in force in the ranks while the controller is restarted is given back as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
from controller_sim import Box, Signal
from test_automatic_policy import JumpingLr

from fp8watch.controller.carry_out import ActionLog
from fp8watch.controller.service import RunController
from fp8watch.detect.base import Sample
from fp8watch.policy.budgets import refusal
from fp8watch.policy.load import parse
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import InForce, PolicyState
from fp8watch.records import ActionRecord

POLICY = """
version: 1
mode: auto
rules:
  - name: scales
    when: {detector: scale_frozen}
    ladder:
      - {action: repair_scale}
      - {action: bf16_layers, settle_steps: 20, hold_steps: 400, hold_growth: 4}
  - name: bursts
    when: {detector: grad_spike}
    ladder:
      - {action: tighten_clip, times_median: 1.5, undo_above_clip_rate: 0.05}
"""


def restart(box: Box) -> None:
    """Another controller on the same store, for the same training process."""
    box.controller = RunController(box.store, clock=lambda: box.now, make_pipeline=lambda run: box.pipeline)
    box._hello()


@pytest.mark.parametrize(("end", "at"), [(240, 400), (900, 700)])
def test_a_learning_rate_held_over_a_restart_of_the_controller_is_given_back(end: int, at: int) -> None:
    """Its hold of 300 steps began at 200. Long after it, and within it, only a schedule that is back ends it."""
    scene = JumpingLr(end=end)
    scene.box.run(at)
    restart(scene.box)
    scene.box.run(1200)
    commanded = [(verb, action) for _, verb, action in scene.box.commanded()]
    assert commanded == [("apply", "hold_lr"), ("apply", "rollback"), ("revert", "hold_lr")]
    assert scene.damage == 0.0
    returned = scene.box.commanded()[-1][0]
    assert returned == (pytest.approx(900, abs=3) if end == 900 else pytest.approx(500, abs=60))


def record(action: str, rule: str, step: int, **fields: Any) -> ActionRecord:
    values: dict[str, Any] = {
        "id": f"r-1.{step:04d}", "run": "r", "attempt": 0, "action": action, "params": {"layers": ["a", "b"]},
        "rule": rule, "finding": "f", "decided_step": step, "applied_step": step, "status": "applied",
        "readback": "ok",
    }  # fmt: skip
    return ActionRecord(**values | fields)


def taken_over(policy: Policy, known: ActionRecord, *, reached: int, seen: int) -> PolicyState:
    log = ActionLog("r", lambda: 0.0)
    return log.restore(PolicyState(), [known], policy=policy, is_same_process=True, reached=reached, seen=seen)


def held(known: ActionRecord, *, reached: int = 300, seen: int = 1000) -> InForce:
    (found,) = taken_over(parse(POLICY), known, reached=reached, seen=seen).in_force
    return found


def test_the_rest_of_a_hold_is_what_is_left_of_it() -> None:
    found = held(record("bf16_layers", "scales", 100))
    assert (found.until_seen, found.since_seen) == (1000 - 200 + 400, 800)
    assert (found.rung, found.settle_steps, found.hold_growth, found.layers) == (1, 20, 4, ("a", "b"))
    assert held(record("bf16_layers", "scales", 100), reached=5000).until_seen == 1000, "over: at once"


def test_the_rung_that_only_observes_says_nothing_of_the_hold() -> None:
    seen_only = "      - {action: bf16_layers, settle_steps: 1, hold_steps: 10, mode: observe}\n"
    policy = parse(POLICY.replace("      - {action: bf16_layers", seen_only + "      - {action: bf16_layers", 1))
    (found,) = taken_over(policy, record("bf16_layers", "scales", 100), reached=300, seen=1000).in_force
    assert (found.rung, found.until_seen) == (2, 1000 - 200 + 400)


@pytest.mark.parametrize(
    ("following", "outcome", "expected"),
    [
        ("{action: rewarm}", "no_effect", (1000, True)), ("{action: halt, mode: observe}", "no_effect", (1000, True)),
        ("{action: rollback}", "no_effect", (None, False)), ("{action: rewarm}", "helped", (None, False)),
    ],
)  # fmt: skip
def test_a_level_without_effect_still_waits_for_its_schedule_only(
    following: str, outcome: str, expected: tuple[int | None, bool]
) -> None:
    ladder = f"      - {{action: hold_lr, settle_steps: 5}}\n      - {following}\n"
    policy = parse(POLICY + "  - name: jump\n    when: {detector: loss_spike}\n    ladder:\n" + ladder)
    known = record("hold_lr", "jump", 100, params={"to_lr": 1e-3}, outcome=outcome)
    (found,) = taken_over(policy, known, reached=300, seen=1000).in_force
    assert (found.until_seen, found.had_no_effect) == expected


def test_layers_that_are_back_already_are_not_given_back_again() -> None:
    """The rank refuses to give back what it does not hold, and the rest would stay in BF16 for good."""

    def script(sample: Sample) -> list[Signal]:
        return [("scale_frozen", "bookkeeping", ("a", "b", "c"))] if 100 <= sample.step < 110 else []

    policy = POLICY.replace("{action: repair_scale}", "{action: repair_scale, settle_steps: 4}").replace(
        "400", "60, max_share: 1"
    )
    box = Box(policy, numbers=lambda step, rank: {}, script=script, layers=("a", "b", "c", "d"))
    while len(box.rank.in_force.get("bf16_layers", {}).get("layers", "abc")) == 3 and box.rank.step < 400:
        box.run(box.rank.step + 1)
    box.run(box.rank.step + 5)
    assert box.rank.in_force["bf16_layers"] == {"layers": ["a", "b"]}
    restart(box)
    box.run(600)
    undone = [command.params["layers"] for _, command in box.rank.applied if command.verb == "revert"]
    assert undone == [["c"], ["b"], ["a"]]
    assert "bf16_layers" not in box.rank.in_force


def test_what_the_policy_keeps_for_good_is_kept_and_a_stall_is_still_ended() -> None:
    found = held(record("tighten_clip", "bursts", 100))
    assert (found.until_seen, found.undo_above_clip_rate) == (None, 0.05)


def test_what_no_rung_of_the_policy_has_taken_is_kept() -> None:
    assert held(record("hold_lr", "gone", 100)).until_seen is None
    assert held(record("hold_lr", "bursts", 100)).until_seen is None


def test_budgets_count_on_where_the_detectors_do() -> None:
    """`seen` goes on from the stored state: what was done shortly before is not long ago."""
    policy = parse(POLICY.replace("rules:", "budgets: {actions_per_1000_steps: 1}\nrules:", 1))
    recent = taken_over(policy, record("hold_lr", "x", 5990), reached=6000, seen=6000)
    assert refusal(policy.budgets, recent.spent, "hold_lr", seen=6001, time_unix=0.0) is not None
    old = taken_over(policy, record("hold_lr", "x", 4000), reached=6000, seen=6000)
    assert refusal(policy.budgets, old.spent, "hold_lr", seen=6001, time_unix=0.0) is None
