"""Quiet times, budgets that are spent, approvals, preconditions, verification, hysteresis: each holds something back,
and each test fails when it does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fp8watch.policy import events
from fp8watch.policy.decide import decide
from fp8watch.policy.load import parse
from fp8watch.policy.state import Decision, PolicyState
from fp8watch.policy.view import Trouble, View
from fp8watch.records import CheckpointRecord


def trouble(**changes: Any) -> Trouble:
    fields: dict[str, Any] = {
        "incident": "i1", "detector": "loss_spike", "cause": "optimisation", "severity": "act", "onset_step": 10,
        "first_step": 10, "last_seen_step": 10, "finding": "f1",
    }  # fmt: skip
    return Trouble(**(fields | changes))


@dataclass
class Run:
    """A run in which every command is applied one step later."""

    text: str
    state: PolicyState = field(default_factory=PolicyState)
    step: int = 10
    log: list[tuple[int, Decision]] = field(default_factory=list)
    on_its_way: Decision | None = None

    def __post_init__(self) -> None:
        self.policy = parse("version: 1\nmode: auto\n" + self.text)

    def go(self, troubles: Iterable[Trouble] = (), steps: int = 1, **view: Any) -> list[Decision]:
        """The decisions of some steps in which these troubles are seen."""
        made: list[Decision] = []
        for _ in range(steps):
            self.step += 1
            seen = tuple(replace(item, last_seen_step=self.step) for item in troubles)
            now = View(run="r", step=self.step, seen=self.step, grad_norm_median=1.0, troubles=seen, **view)
            sent, self.on_its_way = self.on_its_way, None
            if sent is not None and sent.kind == "apply":
                self.state = events.applied(self.policy, self.state, now, sent.action_id)
            elif sent is not None:
                self.state = events.reverted(self.state, now, sent.action_id, ok=True)
            self.state, decisions = decide(self.policy, self.state, now)
            self.on_its_way = next((item for item in decisions if item.kind in {"apply", "revert"}), None)
            made += decisions
            self.log += [(self.step, item) for item in decisions]
        return made


def kinds(decisions: Iterable[Decision]) -> list[tuple[str, str]]:
    return [(item.kind, item.action) for item in decisions if item.kind != "note"]


def reasons(decisions: Iterable[Decision], kind: str = "note") -> list[str]:
    return [item.reason for item in decisions if item.kind == kind]


def ladder(*rungs: str, when: str = "detector: loss_spike", more: str = "") -> str:
    lines = "".join(f"      - {{{rung}}}\n" for rung in rungs)
    return f"rules:\n  - name: a\n    when: {{{when}}}\n{more}    ladder:\n{lines}"


HOLD = "action: hold_lr, factor: 0.5, settle_steps: 4"


# Quiet times


@pytest.mark.parametrize(
    ("quiet", "view"),
    [
        ("in_warmup: true", {"warmup_steps": 20}),
        ("after_start_steps: 10", {"since_start": 10}),
        ("after_evaluation_steps: 5", {"since_evaluation": 3}),
    ],
)
def test_nothing_is_begun_in_a_quiet_time_and_what_lasts_is_acted_on_after_it(quiet: str, view: dict[str, int]) -> None:
    run = Run(f"quiet: {{{quiet}}}\n" + ladder(HOLD))
    made = run.go([trouble()], steps=3, **view)
    assert kinds(made) == []
    assert len(reasons(made)) == 1, "written down once, not once a step"
    assert reasons(made)[0].startswith("quiet: ")
    assert kinds(run.go([trouble()], since_start=11, since_evaluation=9, warmup_steps=5)) == [("apply", "hold_lr")]


def test_a_quiet_time_is_off_by_default_and_spares_what_does_not_heal() -> None:
    view = {"warmup_steps": 20, "since_start": 1, "since_evaluation": 1}
    assert kinds(Run(ladder(HOLD)).go([trouble()], **view)) == [("apply", "hold_lr")]
    text = "quiet: {in_warmup: true, after_start_steps: 9}\n" + ladder(
        "action: repair_scale", when="detector: scale_frozen"
    )
    scales = trouble(detector="scale_frozen", tensors=("a:input",), layers=("a",))
    assert kinds(Run(text).go([scales], **view)) == [("apply", "repair_scale")]


# Budgets


def spent_run(when_spent: str) -> tuple[Run, list[Decision]]:
    budgets = f"budgets: {{actions_per_1000_steps: 1, when_spent: {when_spent}}}\n"
    run = Run(budgets + ladder(HOLD, "action: rewarm"))
    run.go([trouble()], steps=2)
    run.go(steps=12)
    return run, run.go([trouble(incident="i2", onset_step=24, first_step=24)], steps=2)


def test_a_spent_budget_is_observed_asked_about_or_the_end() -> None:
    _, observed = spent_run("observe")
    assert [(item.kind, item.status) for item in observed if item.kind != "note"] == [("record", "refused")]
    run, asked = spent_run("approve")
    assert kinds(asked) == [("wait", "rewarm")]
    assert "budget spent: 1 of 1 actions" in reasons(asked, "wait")[0]
    waiting = next(item.action_id for item in asked if item.kind == "wait")
    assert kinds(run.go([trouble(incident="i2")], verdicts={waiting: "approve"})) == [("apply", "rewarm")]
    _, halted = spent_run("halt")
    assert ("apply", "halt") in kinds(halted)


def test_saving_checkpoints_costs_no_budget_and_is_not_judged() -> None:
    text = "budgets: {actions_per_1000_steps: 0}\n" + ladder(
        "action: checkpoint_cadence, every: 10, hold_steps: 20", when="detector: loss_spike, severity: warn"
    )
    run = Run(text)
    made = run.go([trouble(severity="warn")], steps=4)
    assert kinds(made) == [("apply", "checkpoint_cadence"), ("verdict", "checkpoint_cadence")]
    assert made[-1].outcome == "helped"
    again = run.go([trouble(severity="warn", incident="i2")], steps=2)
    assert [item.reason for item in again if item.status == "unavailable"] == ["already in force"]
    assert ("revert", "checkpoint_cadence") in kinds(run.go(steps=30)), "given back after its hold"


# People


APPROVE = ladder(HOLD, more="    mode: approve\n    approval: {timeout_steps: 6, default: DEFAULT}\n")


def test_nobody_answers_and_the_policy_says_what_that_means() -> None:
    run = Run(APPROVE.replace("DEFAULT", "refuse"))
    (asked,) = (item for item in run.go([trouble()]) if item.kind == "wait")
    assert asked.expires_step == run.step + 6
    assert kinds(run.go([trouble()], steps=6)) == []
    (closed,) = (item for item in run.go([trouble()], steps=2) if item.kind == "record")
    assert (closed.status, closed.reason) == ("expired", "nobody answered in 6 steps")
    late = run.go([trouble()], steps=4, verdicts={asked.action_id: "approve"})
    assert kinds(late) == [], "it cannot be approved after its moment"
    run = Run(APPROVE.replace("DEFAULT", "apply"))
    run.go([trouble()])
    (done,) = (item for item in run.go([trouble()], steps=8) if item.kind == "apply")
    assert done.by == "the policy's default"
    assert "nobody answered in 6 steps" in done.reason


def test_the_person_is_named_and_the_moment_is_looked_at_again() -> None:
    run = Run(APPROVE.replace("DEFAULT", "refuse"))
    (asked,) = (item for item in run.go([trouble()]) if item.kind == "wait")
    answer = {"verdicts": {asked.action_id: "approve"}, "people": {asked.action_id: "mara"}}
    (done,) = (item for item in run.go([trouble()], **answer) if item.kind == "apply")
    assert (done.by, done.reason) == ("mara", "approved by mara")
    run = Run(APPROVE.replace("DEFAULT", "refuse"))
    run.go([trouble()])
    made = run.go([trouble()], **answer, unavailable={"hold_lr": "the loop was compiled"})
    (closed,) = (item for item in made if item.kind == "record")
    assert closed.status == "expired"
    assert "no longer possible: not available in this run" in closed.reason


def test_a_refusal_is_final_for_the_incident() -> None:
    run = Run(APPROVE.replace("DEFAULT", "apply"))
    (asked,) = (item for item in run.go([trouble()]) if item.kind == "wait")
    made = run.go([trouble()], verdicts={asked.action_id: "refuse"}, people={asked.action_id: "mara"}, steps=20)
    assert [(item.status, item.by) for item in made if item.kind == "record"] == [("refused", "mara")]
    assert not [item for item in made if item.kind == "apply"]


def test_a_standing_rule_does_not_wait_for_a_person() -> None:
    run = Run(ladder("action: skip_update", "action: halt", when="detector: nonfinite", more="    mode: approve\n"))
    made = run.go([trouble(detector="nonfinite")], num_skipped=1, is_nonfinite_now=True)
    assert [(item.kind, item.action, item.status) for item in made] == [
        ("record", "skip_update", "unavailable"), ("wait", "halt", None),
    ]  # fmt: skip


# Preconditions


@pytest.mark.parametrize(
    ("requires", "fits", "fails"),
    [
        ("in_warmup: true", {"warmup_steps": 20}, {"warmup_steps": 5}),
        ("in_warmup: false", {"warmup_steps": 5}, {"warmup_steps": 20}),
        ("from_step: 11", {}, None),
        ("loss_above: 0.05", {"losses": tuple((s, 2.0 if s < 10 else 3.0) for s in range(1, 20))}, {}),
        ("loss_above: 0.05", {"losses": tuple((s, 2.0 if s < 10 else 3.0) for s in range(1, 20))},
         {"losses": tuple((s, 2.0) for s in range(1, 20))}),
    ],
)  # fmt: skip
def test_a_rung_is_passed_over_while_its_precondition_does_not_hold(
    requires: str, fits: dict[str, Any], fails: dict[str, Any] | None
) -> None:
    text = ladder(f"{HOLD}, requires: {{{requires}}}", "action: rewarm")
    assert kinds(Run(text).go([trouble()], **fits)) == [("apply", "hold_lr")]
    if fails is not None:
        made = Run(text).go([trouble()], **fails)
        assert kinds(made) == [("record", "hold_lr"), ("apply", "rewarm")]
        assert "requires" in made[0].reason
    if requires.startswith("from_step"):
        assert kinds(Run(text.replace("11", "12")).go([trouble()])) == [("record", "hold_lr"), ("apply", "rewarm")]


def test_layers_and_checkpoints_as_preconditions() -> None:
    few = ladder("action: bf16_layers, max_share: 1.0, requires: {max_layers: 2}", when="detector: saturation")
    wide = trouble(detector="saturation", layers=("a", "b", "c"))
    assert kinds(Run(few).go([wide])) == [("record", "bf16_layers")]
    assert kinds(Run(few).go([replace(wide, layers=("a", "b"))])) == [("apply", "bf16_layers")]
    saved = CheckpointRecord(
        run="r", attempt=0, checkpoint="c", step=5, path="/c", label="good", has_data_position=True
    )
    safe = ladder(f"{HOLD}, requires: {{good_checkpoint: true}}")
    assert kinds(Run(safe).go([trouble()])) == [("record", "hold_lr")]
    assert kinds(Run(safe).go([trouble()], checkpoints=(saved,))) == [("apply", "hold_lr")]


def test_scope_and_layer_patterns_of_a_rule() -> None:
    text = ladder("action: halt", when="detector: saturation, scope: SCOPE")
    one_rank = trouble(detector="saturation", rank=3, layers=("a",), tensors=("a:input",))
    tensors = replace(one_rank, rank=None)
    layers = replace(tensors, tensors=())
    everywhere = replace(layers, layers=())
    for scope, found in (("rank", one_rank), ("tensor", tensors), ("layer", layers), ("run", everywhere)):
        assert kinds(Run(text.replace("SCOPE", scope)).go([found])) == [("apply", "halt")], scope
        for other in {"rank", "tensor", "layer", "run"} - {scope}:
            made = Run(text.replace("SCOPE", other)).go([found])
            assert reasons(made) == [f"no rule has it: a: scope is {scope}"]
    text = ladder("action: halt", when="detector: saturation, layers: ['blocks.*.down', head]")
    assert kinds(Run(text).go([replace(one_rank, layers=("x", "blocks.3.down"))])) == [("apply", "halt")]
    assert reasons(Run(text).go([replace(one_rank, layers=("blocks.3.up",))])) == ["no rule has it: a: other layers"]


# Verification and hysteresis


def test_helped_means_what_the_rung_says() -> None:
    hurt = tuple((step, 2.0 if step < 10 else 2.6) for step in range(1, 60))
    strict = f"{HOLD}, verify: {{loss_within: 0.1}}"
    outcomes = {}
    for name, rung in (("default", HOLD), ("strict", strict)):
        run = Run(ladder(rung, "action: rewarm"))
        run.go([trouble()])
        made = run.go(steps=8, losses=hurt)
        outcomes[name] = next(item for item in made if item.kind == "verdict")
    assert outcomes["default"].outcome == "helped"
    assert outcomes["strict"].outcome == "no_effect"
    assert "loss still 30.0% above" in outcomes["strict"].reason
    whole = Run(ladder(f"{HOLD}, verify: {{quiet_share: 1.0}}"))
    half = Run(ladder(HOLD))
    for run in (whole, half):  # seen once more early in the window, then no more
        run.go([trouble()])
        run.go([trouble()], steps=2)
        run.go([replace(trouble(), last_seen_step=run.step)], steps=0)
        last = run.step
        for _ in range(6):
            run.step += 1
            now = View(run="r", step=run.step, seen=run.step, troubles=(replace(trouble(), last_seen_step=last),))
            run.state, decisions = decide(run.policy, run.state, now)
            run.log += [(run.step, item) for item in decisions]
    verdicts = [next(item.outcome for _, item in run.log if item.kind == "verdict") for run in (whole, half)]
    assert verdicts == ["no_effect", "helped"]


def test_without_effect_it_is_undone_unless_the_rung_says_to_keep_it() -> None:
    for more, undone in (("", True), (", undo_without_effect: false", False)):
        run = Run(ladder(HOLD + more, "action: tighten_clip, settle_steps: 4"))
        made = run.go([trouble()], steps=12)
        assert (("revert", "hold_lr") in kinds(made)) is undone
        assert ("apply", "tighten_clip") in kinds(made)


def test_a_clip_limit_that_fires_all_the_time_is_undone() -> None:
    rung = "action: tighten_clip, settle_steps: 4, undo_above_clip_rate: 0.05"
    for text, rate, undone in ((rung, 0.2, True), (rung, 0.04, False), (rung[:38], 0.2, False)):
        run = Run(ladder(text))
        run.go([trouble()])
        assert kinds(run.go(steps=290, clip_rate=rate)) == [("verdict", "tighten_clip")], "too young to tell"
        made = run.go(steps=20, clip_rate=rate)
        assert (kinds(made) == [("revert", "tighten_clip")]) is undone
        if undone:
            assert "20% of 300 steps clipped, over 5%: a stall" in made[0].reason


def test_a_failed_return_is_held_as_much_longer_as_the_rung_says() -> None:
    times = {}
    for more in ("", ", hold_growth: 5"):
        run = Run(ladder(f"{HOLD}, hold_steps: 10{more}"))
        run.go([trouble()])
        run.go(steps=20)  # helped, held, given back
        run.go([trouble(incident="i2", onset_step=run.step, first_step=run.step)])
        run.go(steps=150)
        applied = [step for step, item in run.log if item.kind == "apply"]
        returned = [step for step, item in run.log if item.kind == "revert"]
        times[more] = returned[1] - applied[1]
    assert times[""] == 21
    assert times[", hold_growth: 5"] == 51


# What was a warning


def test_a_warning_that_grows_serious_begins_its_own_rules_ladder() -> None:
    text = (
        "rules:\n  - name: serious\n    when: {detector: loss_spike, severity: act}\n    ladder: [{action: hold_lr}]\n"
        "  - name: risk\n    when: {detector: loss_spike, severity: warn}\n    ladder: [{action: checkpoint_now}]\n"
    )
    run = Run(text)
    assert kinds(run.go([trouble(severity="warn")], steps=4))[0] == ("apply", "checkpoint_now")
    assert kinds(run.go([trouble()], steps=3))[0] == ("apply", "hold_lr")


def test_what_nothing_is_done_about_is_written_down_once_with_the_reason() -> None:
    run = Run(ladder(HOLD, when="detector: loss_spike, cause: data, for_steps: 3"))
    made = run.go([trouble()], steps=5)
    assert [item.reason for item in made] == ["no rule has it: a: cause is optimisation"]
    run = Run(ladder(HOLD))
    assert reasons(run.go([trouble(detector="crest")], steps=3)) == ["no rule speaks of it"]
    run.go([trouble()])
    made = run.go([trouble(), trouble(incident="i2")], steps=2)
    assert "an action is under way or settling: two effects could not be told apart" in reasons(made)
