"""A policy file: all errors are reported at once with their lines, and zero is not absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.errors import BadInput
from fp8watch.policy import arms_skip_update
from fp8watch.policy.load import json_schema, load, parse, shipped
from fp8watch.policy.rungs import Rollback
from fp8watch.policy.schema import Policy
from fp8watch.records import ACTIONS, DETECTORS

BAD = """version: 1
mode: autoo
budgets: {actions_per_1000_steps: -1, foo: 0}
rules:
  - name: a
    when: {detector: scale_frozen, severity: act, for_steps: 0}
    ladder:
      - {action: repair_scale, scope: run}
      - {action: bf16_layers, scope: tensor, settle_steps: "20"}
      - {action: rollback, skip_batches: 1.5, bar: 3}
      - {action: nothing}
  - when: {detector: [nope]}
"""


def problems(text: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        parse(text, "p.yaml")
    return caught.value.problems


def said_of(text: str) -> list[str]:
    """Problems of a text; none: it is a policy. Anything but `BadInput` is a failure."""
    try:
        parse(text)
    except BadInput as error:
        return error.problems or ["nothing was said"]
    return []


def test_all_errors_are_named_with_file_line_field_and_reason() -> None:
    found = [tuple(problem.split(": ", 2)) for problem in problems(BAD)]
    assert [(where, field) for where, field, _ in found] == [
        ("p.yaml:2", "mode"),
        ("p.yaml:3", "budgets.actions_per_1000_steps"),
        ("p.yaml:3", "budgets.foo"),
        ("p.yaml:6", "rules[0].when.for_steps"),
        ("p.yaml:9", "rules[0].ladder[1].scope"),
        ("p.yaml:9", "rules[0].ladder[1].settle_steps"),
        ("p.yaml:10", "rules[0].ladder[2].bar"),
        ("p.yaml:10", "rules[0].ladder[2].skip_batches"),
        ("p.yaml:11", "rules[0].ladder[3]"),
        ("p.yaml:12", "rules[1].name"),
        ("p.yaml:12", "rules[1].when.detector"),
    ]
    assert all(reason for _, _, reason in found)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("- 1\n", 1),
        ("version: 1\nmode: [a\nrules: b", 3),
        ("version: 1\nversion: 1\n", 2),
        ("version: 2\n", 1),
    ],
)
def test_what_is_no_policy_at_all(text: str, line: int) -> None:
    assert problems(text)[0].startswith(f"p.yaml:{line}: ")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "version: 1\nrules: &r [*r]\n",
    ],
)
def test_aliases_that_mean_billions_of_values_or_themselves_are_refused(text: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith("p.yaml:")


def test_two_rules_of_one_name_are_an_error() -> None:
    rule = "  - {name: a, when: {detector: stuck}}\n"
    assert "two rules named a" in problems("version: 1\nrules:\n" + rule + rule)[0]


def test_zero_and_absent_differ() -> None:
    # case: SPK-25
    absent = parse("version: 1\n")
    zero = parse("version: 1\nbudgets: {actions_per_1000_steps: 0, rollbacks_per_24h: 0}\nhealthy_steps: 0\n")
    assert (absent.budgets.rollbacks_per_24h, zero.budgets.rollbacks_per_24h) == (2, 0)
    assert (absent.budgets.actions_per_1000_steps, zero.budgets.actions_per_1000_steps) == (4, 0)
    assert (absent.healthy_steps, zero.healthy_steps) == (8, 0)
    rule = "version: 1\nrules: [{{name: a, when: {{detector: stuck{when}}}, ladder: [{{action: rollback{rung}}}]}}]\n"
    plain = parse(rule.format(when="", rung="")).rules[0]
    given = parse(rule.format(when=", near_warmup_steps: 0", rung=", hold_steps: 0, if_loss_above: 0")).rules[0]
    assert (plain.when.near_warmup_steps, given.when.near_warmup_steps) == (None, 0)
    assert (plain.ladder[0].hold_steps, given.ladder[0].hold_steps) == (None, 0)
    assert (plain.ladder[0].if_loss_above, given.ladder[0].if_loss_above) == (None, 0.0)


@pytest.mark.parametrize("value", ["'3'", "true", "3.0", ".nan", ".inf", "~", "[3]", "-1"])
def test_nothing_is_coerced(value: str) -> None:
    assert "healthy_steps" in problems(f"version: 1\nhealthy_steps: {value}\n")[0]


def test_one_or_a_list_mean_the_same() -> None:
    one = parse("version: 1\nrules: [{name: a, when: {detector: stuck, cause: data}}]\n")
    many = parse("version: 1\nrules: [{name: a, when: {detector: [stuck], cause: [data]}}]\n")
    assert one == many


def test_a_rule_can_only_lower_the_mode() -> None:
    text = "version: 1\nmode: {file}\nrules: [{{name: a, mode: {rule}, when: {{detector: stuck}}}}]\n"
    for file, rule, expected in [
        ("approve", "auto", "approve"), ("auto", "approve", "approve"), ("auto", "observe", "observe"),
        ("observe", "auto", "observe"),
    ]:  # fmt: skip
        policy = parse(text.format(file=file, rule=rule))
        assert policy.rule_mode(policy.rules[0]) == expected


def test_skip_update_is_armed_only_by_a_rule_in_auto() -> None:
    text = (
        "version: 1\nmode: {mode}\nrules: [{{name: a, when: {{detector: nonfinite}},"
        " ladder: [{{action: skip_update, max_consecutive: {most}}}]}}]\n"
    )
    assert arms_skip_update(parse(text.format(mode="auto", most=3)))
    assert not arms_skip_update(parse(text.format(mode="approve", most=3)))
    # case: SPK-25
    assert not arms_skip_update(parse(text.format(mode="auto", most=0)))


def test_shipped_policies_load_and_the_default_observes() -> None:
    assert {"auto", "observe"} <= set(shipped())
    for name in shipped():
        assert isinstance(load(name), Policy)
    assert load(None).mode == "observe"
    assert load("auto").mode == "auto"


def test_the_automatic_policy_never_answers_hardware_or_data_with_precision() -> None:
    for rule in load("auto").rules:
        actions = {rung.action for rung in rule.ladder}
        causes = set(rule.when.cause or ())
        if causes & {"hardware", "data"} and causes <= {"hardware", "data"}:
            assert not actions & {"bf16_layers", "bf16_all", "repair_scale", "raise_margin"}, rule.name
        if causes == {"data"}:
            assert not rule.ladder
    for rule in load("auto").rules:
        if rule.when.detector != ("nonfinite",):
            assert rule.when.cause is not None, f"{rule.name} acts whatever the cause"


def test_a_file_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nmode: approve\n")
    assert load(path).mode == "approve"
    assert load(str(path)).mode == "approve"
    path.write_bytes(b"version: 1\nmode: \xff\n")
    with pytest.raises(BadInput, match=r":2: policy: not UTF-8"):
        load(path)
    with pytest.raises(BadInput, match="shipped policies: auto, conservative, finetune, fp8-pretraining, observe"):
        load(str(tmp_path / "absent.yaml"))


def test_schema_speaks_of_every_action_and_key() -> None:
    text = json_schema()
    assert all(f'"{name}"' in text for name in ACTIONS)
    assert '"if_loss_above"' in text


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_bad_input(text: str) -> None:
    assert all(problem.startswith("<policy>:") for problem in said_of(text))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(["version", "mode", "budgets", "rules", "healthy_steps"]),
)
def test_any_value_in_any_place_is_taken_or_named(value: object, field: str) -> None:
    text = json.dumps({"version": 1, field: value})
    assert all(problem.startswith("<policy>:") for problem in said_of(text))


@given(
    detectors=st.lists(st.sampled_from(DETECTORS), min_size=1, max_size=4),
    settle=st.integers(0, 1000),
    hold=st.none() | st.integers(0, 1000),
    skip=st.integers(0, 1000),
)
def test_what_is_written_is_what_is_read(detectors: list[str], settle: int, hold: int | None, skip: int) -> None:
    held = "" if hold is None else f", hold_steps: {hold}"
    policy = parse(
        f"version: 1\nrules:\n  - name: a\n    when: {{detector: {detectors}}}\n    ladder:\n"
        f"      - {{action: rollback, settle_steps: {settle}, skip_batches: {skip}{held}}}\n".replace("'", "")
    )
    (rung,) = policy.rules[0].ladder
    assert isinstance(rung, Rollback)
    assert policy.rules[0].when.detector == tuple(detectors)
    assert (rung.settle_steps, rung.hold_steps, rung.skip_batches) == (settle, hold, skip)
