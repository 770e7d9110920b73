"""A rung's own mode: costly rungs ask while cheap ones act, and what only observes is said and passed over."""

from __future__ import annotations

from typing import Any

import pytest
from test_policy_check import HEAD, faults, rule
from test_policy_rules import HOLD, Run, kinds, ladder, trouble
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.policy.load import check, load, parse
from fp8watch.policy.schema import arms_skip_update, skip_limits
from fp8watch.policy.state import Decision
from fp8watch.policy.unresolved import why_unresolved
from fp8watch.policy.view import View

SHORT = "    approval: {timeout_steps: 6, default: DEFAULT}\n"
NAN = {"detector": "nonfinite", "cause": "unknown"}


def asking(default: str = "refuse") -> tuple[Run, Decision]:
    """A run whose first, cheap rung had no effect, and the question about the second, costly one."""
    more = SHORT.replace("DEFAULT", default)
    run = Run(ladder(HOLD, "action: rewarm, mode: approve, settle_steps: 4", "action: halt", more=more))
    made = run.go([trouble()], steps=8)
    assert kinds(made) == [
        ("apply", "hold_lr"), ("verdict", "hold_lr"), ("revert", "hold_lr"), ("wait", "rewarm"),
    ]  # fmt: skip
    assert [item.mode for item in made if item.kind in {"apply", "wait"}] == ["auto", "approve"]
    return run, made[-1]


def test_a_rung_that_asks_is_not_done_before_the_answer_and_the_cheap_one_before_it_is() -> None:
    run, asked = asking()
    assert "hold_lr had no effect" in asked.reason
    assert kinds(run.go([trouble()], steps=4)) == [], "neither this rung nor the next"
    (done,) = run.go([trouble()], verdicts={asked.action_id: "approve"}, people={asked.action_id: "mara"})
    assert (done.kind, done.action, done.action_id) == ("apply", "rewarm", asked.action_id)
    assert (done.mode, done.by) == ("approve", "mara")
    later = run.go([trouble()], steps=8)
    assert ("apply", "halt") in kinds(later), "an approved rung is a rung: without effect the ladder goes on"


def test_silence_means_for_a_rung_what_the_policy_says() -> None:
    run, asked = asking("refuse")
    made = [item for item in run.go([trouble()], steps=30) if item.kind != "note"]
    assert [(item.kind, item.status, item.mode) for item in made] == [("record", "expired", "approve")]
    assert made[0].reason.startswith("nobody answered in 6 steps")
    run, asked = asking("apply")
    done = next(item for item in run.go([trouble()], steps=8) if item.kind == "apply")
    assert (done.action_id, done.by) == (asked.action_id, "the policy's default")


def test_a_refused_rung_ends_the_ladder() -> None:
    run, asked = asking()
    made = run.go([trouble()], steps=20, verdicts={asked.action_id: "refuse"})
    assert [(item.kind, item.status) for item in made if item.kind != "note"] == [("record", "refused")]


def test_a_rung_that_observes_is_said_once_and_the_next_is_taken() -> None:
    budgets = "budgets: {actions_per_1000_steps: 1}\n"
    run = Run(budgets + ladder(HOLD + ", mode: observe", "action: rewarm, settle_steps: 4"))
    made = run.go([trouble()], steps=3)
    assert kinds(made) == [("propose", "hold_lr"), ("apply", "rewarm")], "and what is only said costs no budget"
    assert [item.mode for item in made if item.kind != "note"] == ["observe", "auto"]
    run = Run(ladder(HOLD + ", mode: observe", "action: rewarm"))
    assert kinds(run.go([trouble()], steps=3, disarmed="by hand")) == [("propose", "hold_lr"), ("propose", "rewarm")]
    run = Run(ladder(HOLD + ", mode: observe"))
    assert kinds(run.go([trouble()], steps=40)) == [("propose", "hold_lr")]


def test_nothing_is_kept_for_a_rung_that_only_observes() -> None:
    """A rung without effect stays in force for the next one to build on, if that one is ever taken."""
    for more, undone in (("", False), (", mode: approve", False), (", mode: observe", True)):
        run = Run(ladder(HOLD, "action: bf16_all" + more, "action: rewarm"))
        assert (("revert", "hold_lr") in kinds(run.go([trouble()], steps=8))) is undone, more


@pytest.mark.parametrize("last", ["mode: observe", "requires: {from_step: 10000}"])
def test_what_is_left_of_a_damage_is_not_answered_by_a_rung_that_is_not_for_it(last: str) -> None:
    """`hold_lr` has helped. The rung for damage that is left is only said, or cannot be taken: the halt is not due."""
    hurt = tuple((step, 2.0 if step < 10 else 2.6) for step in range(1, 60))
    run = Run(ladder(HOLD, f"action: rewarm, if_loss_above: 0.1, {last}", "action: halt"))
    run.go([trouble()])
    made = run.go(steps=20, losses=hurt)
    passed = "propose" if "observe" in last else "record"
    assert kinds(made) == [("verdict", "hold_lr"), (passed, "rewarm")]
    assert made[0].outcome == "helped"
    again = run.go([trouble(incident="i2", onset_step=run.step)], steps=2)
    (halted,) = [item for item in again if item.kind == "apply"]
    assert halted.action == "halt", "it is where the ladder stands when the trouble comes back"
    assert "after hold_lr had helped" in halted.reason


def test_a_rung_for_damage_that_had_no_effect_is_followed_by_the_next() -> None:
    hurt = tuple((step, 2.0 if step < 10 else 2.6) for step in range(1, 60))
    repair = "action: rewarm, if_loss_above: 0.1, settle_steps: 4, verify: {loss_within: 0.1}"
    run = Run(ladder(HOLD, repair, "action: halt"))
    run.go([trouble()])
    assert kinds(run.go(steps=6, losses=hurt)) == [("verdict", "hold_lr"), ("apply", "rewarm")]
    assert kinds(run.go(steps=8, losses=hurt)) == [("verdict", "rewarm"), ("apply", "halt"), ("verdict", "halt")]


# Modes of file, rule and rung


@pytest.mark.parametrize(
    ("file", "of_rule", "of_rung", "expected"),
    [
        ("auto", "", "", "auto"), ("auto", "", "approve", "approve"), ("auto", "", "observe", "observe"),
        ("auto", "approve", "auto", "approve"), ("auto", "approve", "observe", "observe"),
        ("approve", "", "auto", "approve"), ("approve", "auto", "auto", "approve"), ("observe", "", "auto", "observe"),
    ],
)  # fmt: skip
def test_a_rung_can_only_lower_the_mode(file: str, of_rule: str, of_rung: str, expected: str) -> None:
    more = f"    mode: {of_rule}\n" if of_rule else ""
    rung = HOLD + (f", mode: {of_rung}" if of_rung else "")
    text = ladder(rung, more=more)
    policy = parse(f"version: 1\nmode: {file}\n{text}")
    assert policy.rung_mode(policy.rules[0], policy.rules[0].ladder[0]) == expected
    run = Run(text)
    run.policy = policy
    (made,) = kinds(run.go([trouble()], steps=1))
    assert made[0] == {"auto": "apply", "approve": "wait", "observe": "propose"}[expected]


@pytest.mark.parametrize(
    ("head", "more", "rung", "problem"),
    [
        ("mode: approve\n", "", "mode: auto", "auto is looser than the file's approve, which stands"),
        ("mode: observe\n", "", "mode: auto", "auto is looser than the file's observe, which stands"),
        ("", "", "mode: auto", "auto is looser than the file's observe, which stands"),
        ("mode: auto\n", "    mode: approve\n", "mode: auto", "auto is looser than the rule's approve, which stands"),
        ("mode: auto\n", "    mode: observe\n", "mode: auto", "auto is looser than the rule's observe, which stands"),
    ],
)
def test_a_looser_mode_than_the_one_above_it_is_refused(head: str, more: str, rung: str, problem: str) -> None:
    text = f"version: 1\n{head}rules:\n" + rule("detector: stuck", f"action: hold_lr, {rung}", more=more)
    (found,) = faults(text)
    assert found.endswith(f"rules[0].ladder[0].mode: {problem}")
    assert parse(text), "a run starts with it all the same"


def test_a_rule_that_is_looser_than_its_file_is_refused() -> None:
    text = "version: 1\nrules:\n" + rule("detector: stuck", "action: hold_lr", more="    mode: auto\n")
    assert faults(text) == ["<policy>:5: rules[0].mode: auto is looser than the file's observe, which stands"]


@pytest.mark.parametrize("lowered", ["observe", "approve"])
def test_a_policy_whose_mode_is_lowered_for_a_while_stays_valid(lowered: str) -> None:
    """One word at its top disarms it, or makes all of it ask; what is below it stays as it is."""
    more = "    mode: approve\n"
    text = "rules:\n" + rule("detector: stuck", "action: hold_lr, mode: approve", "action: halt, mode: approve")
    text += rule("detector: nonfinite", "action: rewarm", more=more, name="b")
    assert check(HEAD + text).mode == "auto"
    assert check(f"version: 1\nmode: {lowered}\n{text}").mode == lowered


@pytest.mark.parametrize(
    ("ladder_of", "problem"),
    [
        (("action: skip_update, mode: approve", "action: halt"), "the ranks carry it out on the spot"),
        (("action: halt, mode: approve", "action: rewarm"), "ladder[1]: is never reached: the rung before stops"),
        (("action: rewarm", "action: rewarm, mode: approve"), "ladder[1]: is the rung before once more"),
        (("action: rewarm", "action: hold_lr, mode: observe", "action: rewarm"), "ladder[2]: is the rung before once"),
        (("action: halt, mode: observe", "action: rewarm, if_loss_above: 0.1"), "no meaning on the first rung"),
    ],
)
def test_a_rung_is_judged_under_its_own_mode(ladder_of: tuple[str, ...], problem: str) -> None:
    (found,) = faults(HEAD + "rules:\n" + rule("detector: nonfinite", *ladder_of))
    assert problem in found


@pytest.mark.parametrize(
    ("ladder_of", "head"),
    [
        (("action: halt, mode: observe", "action: rewarm"), ""),
        (("action: rewarm, mode: observe", "action: rewarm"), ""),
        (("action: tighten_clip, mode: observe", "action: halt"), ""),
        (("action: rollback, mode: observe", "action: halt"), "budgets: {rollbacks_per_24h: 0}\n"),
        (("action: rewarm, mode: observe", "action: halt"), "budgets: {actions_per_1000_steps: 0}\n"),
        (("action: adjust_loss_scale, factor: 2.0, mode: observe", "action: adjust_loss_scale, factor: 0.5"), ""),
    ],
)
def test_a_rung_that_observes_may_say_what_it_likes(ladder_of: tuple[str, ...], head: str) -> None:
    assert check(HEAD + head + "rules:\n" + rule("detector: nonfinite", *ladder_of))


def test_ranks_skip_updates_only_for_a_rung_in_auto() -> None:
    def policy(*rungs: str) -> Any:
        return parse(HEAD + "rules:\n" + rule("detector: nonfinite", *rungs))

    assert arms_skip_update(policy("action: skip_update"))
    assert not arms_skip_update(policy("action: skip_update, mode: observe"))
    assert not arms_skip_update(policy("action: skip_update, mode: approve"))
    both = policy("action: skip_update, max_consecutive: 1, mode: observe", "action: skip_update, max_consecutive: 2")
    assert skip_limits(both) == [2], "the limit of what is only said limits nothing"
    run = Run(ladder("action: skip_update, mode: observe", "action: halt", when="detector: nonfinite"))
    made = run.go([trouble(**NAN)], is_nonfinite_now=True)
    assert kinds(made) == [("propose", "skip_update"), ("apply", "halt")]


def test_policy_check_shows_which_rungs_ask() -> None:
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(build(), ["policy", "check", "conservative"]).stdout
    assert "skip_update -> bf16_all (approve) -> halt (approve)" in " ".join(shown.split())


# A question does not keep a graver trouble waiting


def test_a_question_about_a_warning_does_not_keep_the_rule_for_the_case_to_act_waiting() -> None:
    early = ladder("action: rewarm, mode: approve", when="detector: loss_spike, severity: warn")
    late = "  - name: b\n    when: {detector: loss_spike}\n    ladder: [{action: halt}]\n"
    run = Run("rules:\n" + late + early.removeprefix("rules:\n"))
    (asked,) = run.go([trouble(severity="warn")])
    made = run.go([trouble()])
    assert kinds(made) == [("record", "rewarm"), ("apply", "halt")]
    assert (made[0].action_id, made[0].status, made[0].reason) == (
        asked.action_id, "expired", "the trouble has grown: rule b has it now"
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "kind"), [("approve", "wait"), ("observe", "propose")])
def test_a_trouble_that_two_rules_match_in_turn_is_asked_about_once(mode: str, kind: str) -> None:
    """Its worst tensor changes from step to step. Neither rule is for cases to act only: it has not grown."""
    rules = "".join(
        f"  - {{name: {name}, mode: {mode}, when: {{detector: underflow, severity: warn{tensor}}}, ladder: [{rung}]}}\n"
        for name, tensor, rung in (("a", ", tensor: grad_output", "{action: rewarm}"), ("b", "", "{action: halt}"))
    )
    run = Run("rules:\n" + rules)
    made: list[Decision] = []
    for worst in ("grad_output", "input") * 6:
        made += run.go([trouble(detector="underflow", tensors=(f"m:{worst}",), layers=("m",))])
    assert kinds(made) == [(kind, "rewarm")]


@pytest.mark.parametrize("answer", [None, "refuse"])
def test_an_asked_rung_does_not_keep_poisoned_parameters_waiting(answer: str | None) -> None:
    policy = load("conservative")
    run = Run("rules: []")
    run.policy = policy
    bad = trouble(**NAN)
    asked = run.go([bad], num_skipped=4, is_nonfinite_now=True)[-1]
    assert (asked.kind, asked.rule, asked.action) == ("wait", "non-finite", "bf16_all")
    verdicts = {} if answer is None else {asked.action_id: answer}
    run.go([bad], num_skipped=5, is_nonfinite_now=True, verdicts=verdicts)
    poisoned = {"is_nonfinite_now": True, "params_nonfinite": True}
    made = run.go([bad], steps=52, **poisoned)
    status = [] if answer else [("record", "expired")]
    assert [(item.kind, item.status) for item in made if item.action == "bf16_all"] == status
    assert [(item.kind, item.rule) for item in made if item.action == "halt"] == [
        ("wait", "poisoned-parameters"), ("apply", "poisoned-parameters"),
    ], "asked, and done when nobody answers in 50 steps"  # fmt: skip


# What only observes changes nothing that is done


HURT = tuple((step, 2.0 if step < 10 else 2.6) for step in range(1, 200))
REPAIR = "action: rewarm, if_loss_above: 0.1, settle_steps: 4"


def done(*rungs: str, losses: tuple[tuple[int, float], ...] = HURT) -> list[tuple[str, str]]:
    """What is done when the first rung helps, the loss stays where it is, and the trouble comes back."""
    run = Run(ladder(*rungs))
    made = run.go([trouble()], losses=losses)
    made += run.go(steps=8, losses=losses)
    made += run.go([trouble()], steps=3, losses=losses)
    return [kind for kind in kinds(made) if kind[0] not in {"propose", "record"}]


@pytest.mark.parametrize("watcher", ["action: halt", "action: tighten_clip, if_loss_above: 0.5"])
def test_a_rung_that_observes_does_not_hide_the_one_that_repairs_what_is_left(watcher: str) -> None:
    assert done(HOLD, f"{watcher}, mode: observe", REPAIR) == done(HOLD, REPAIR)
    assert ("apply", "rewarm") in done(HOLD, REPAIR)


def test_less_damage_than_a_rung_is_for_is_not_repaired_because_another_was_only_said() -> None:
    far = "action: rewarm, if_loss_above: 0.5"
    for more in ("mode: observe", "requires: {from_step: 10000}"):
        run = Run(ladder(HOLD, f"action: tighten_clip, if_loss_above: 0.1, {more}", far))
        made = run.go([trouble()], losses=HURT) + run.go(steps=8, losses=HURT)
        assert [action for kind, action in kinds(made) if kind == "apply"] == ["hold_lr"], more


@pytest.mark.parametrize("last", ["mode: observe", "requires: {from_step: 10000}"])
def test_a_hold_that_helped_is_held_longer_although_nothing_could_be_done_for_the_damage(last: str) -> None:
    """The same incident is seen again after its hold: it was not finished for good by a rung that was not taken."""
    held = HOLD + ", hold_steps: 10"

    def applied(*rungs: str) -> list[str]:
        run = Run(ladder(*rungs))
        made = run.go([trouble()], losses=HURT) + run.go(steps=14, losses=HURT)
        assert ("revert", "hold_lr") in kinds(made)
        made += run.go([trouble()], steps=2, losses=HURT)
        return [action for kind, action in kinds(made) if kind == "apply"]

    assert applied(held, f"{REPAIR}, {last}") == applied(held) == ["hold_lr", "hold_lr"]


def test_a_damage_for_which_nothing_could_be_done_is_still_damage() -> None:
    for more in (f"{REPAIR}, mode: observe", f"{REPAIR}, requires: {{from_step: 10000}}"):
        run = Run(ladder(HOLD, more))
        run.go([trouble()], losses=HURT)
        run.go(steps=8, losses=HURT)
        view = View(run="r", step=run.step, seen=run.step, losses=HURT[: run.step])
        assert why_unresolved(run.policy, run.state, view, "i1") is not None, more
        sound = View(run="r", step=run.step, seen=run.step, losses=tuple((step, 2.0) for step, _ in HURT))
        assert why_unresolved(run.policy, run.state, sound, "i1") is None, more


def test_a_level_given_back_by_another_rule_is_held_again_past_a_rung_that_observes() -> None:
    first = ladder(HOLD + ", hold_steps: 8", when="detector: loss_spike")
    other = "  - {name: b, when: {detector: update_rms}, ladder: [%s{action: hold_lr, factor: 0.5, hold_steps: 8}]}\n"
    for more in ("", "{action: halt, mode: observe}, "):
        run = Run(first + other % more)
        run.go([trouble()])
        assert ("revert", "hold_lr") in kinds(run.go(steps=14))
        made = run.go([trouble(incident="i2", detector="update_rms", onset_step=run.step)])
        again = next(item for item in made if item.kind == "apply")
        assert (again.action, again.reason.startswith("came back")) == ("hold_lr", True), more
