"""A mistake in a policy is reported in one line, in the words of the file, not of the library that found it."""

from __future__ import annotations

import json
import re

import pytest

from fp8watch.errors import BadInput
from fp8watch.policy.load import PLACES, json_schema, load, parse
from fp8watch.records import ACTIONS

LIBRARY = re.compile(r"Input should|Field required|discriminator|instance of|valid dictionary|extra|expected tags|ctx")
RULE = "version: 1\nrules:\n  - {name: a, when: {detector: stuck}, ladder: [{action: rollback}]}\n"


def said(text: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        parse(text, "p.yaml")
    assert not any(LIBRARY.search(problem) for problem in caught.value.problems), caught.value.problems
    return [problem.removeprefix("p.yaml:") for problem in caught.value.problems]


@pytest.mark.parametrize("key", ["version", "name", "when", "detector", "action"])
def test_a_required_key_that_is_misspelt_is_one_mistake(key: str) -> None:
    typo = key[:2] + key[3] + key[2] + key[4:]
    (problem,) = said(RULE.replace(f"{key}:", f"{typo}:"))
    assert problem.endswith(f"{typo}: unknown key (did you mean {key}?)")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("approval: {timeout_step: 5, default: refuse}", "2: approval.timeout_step: unknown key"),
        ("approval: {timeout_steps: 5, defualt: refuse}", "2: approval.defualt: unknown key"),
        ("mode: autoo", "2: mode: observe, approve or auto is wanted, found 'autoo' (did you mean auto?)"),
        ("mode: [auto]", "2: mode: observe, approve or auto is wanted, found a list"),
        ("healthy_steps: 1.5", "2: healthy_steps: a whole number is wanted, found 1.5"),
        ("healthy_steps: -1", "2: healthy_steps: at least 0 is wanted, found -1"),
        ("healthy_steps:", "2: healthy_steps: a whole number is wanted, found nothing"),
        ("quiet: {in_warmup: yes please}", "2: quiet.in_warmup: true or false is wanted, found 'yes please'"),
        ("rules: {name: a}", "2: rules: a list (items begin with -) is wanted, found a mapping"),
        ("rules: [a]", "2: rules[0]: a mapping (key: value) is wanted, found 'a'"),
        ("rules: [{name: 5, when: {detector: stuck}}]", '2: rules[0].name: text is wanted, found 5 (write "5")'),
        ("rules: [{name: a, when: {detector: }}]", "detector: a name or a list of names is wanted, found nothing"),
        ("rules: [{name: '', when: {detector: stuck}}]", "2: rules[0].name: empty"),
        ("rules: [{name: a, when: {detector: stuck}, settle_steps: 3}]",
         "2: rules[0].settle_steps: not a key of this; it belongs to a rung of a ladder"),
        ("skip_batches: 3", "2: skip_batches: not a key of this; it belongs to action rollback"),
        ("budgets: {name: x}", "2: budgets.name: not a key of this; it belongs to a rule"),
    ],
)  # fmt: skip
def test_what_is_wanted_is_said_plainly(body: str, problem: str) -> None:
    (found,) = said(f"version: 1\n{body}\n")
    assert problem in found


@pytest.mark.parametrize(
    ("rung", "problem"),
    [
        ("{}", "a rung needs an action, such as action: rollback"),
        ("{action: rolback}", "unknown action 'rolback' (did you mean rollback?); known: "),
        ("{action: 3}", "unknown action 3; known: "),
        ("{action: hold_lr, factor: 2.0}", "ladder[0].factor: at most 1.0 is wanted, found 2.0"),
        ("rollback", "a mapping (key: value) is wanted, found 'rollback'"),
    ],
)
def test_rungs(rung: str, problem: str) -> None:
    (found,) = said(RULE.replace("{action: rollback}", rung))
    assert problem in found


def test_a_version_in_quotes(tmp_path: object) -> None:
    assert said('version: "1"\n') == ["1: version: 1 is wanted, found '1' (write it without quotes)"]
    with pytest.raises(BadInput, match="policy: empty; shipped policies"):
        load(" ")


def test_every_key_of_the_schema_has_a_place() -> None:
    assert {*re.findall(r'"(\w+)": \{', json_schema())} - set(PLACES) - {"properties", "items"} <= {
        "Approval", "Budgets", "Change", "Quiet", "Requires", "Rule", "Verify", "When", "discriminator", "mapping",
        "additionalProperties", "$defs", "params", *json.loads(json_schema())["$defs"],
    }  # fmt: skip
    assert all(f"action {name}" not in places for name in ACTIONS for places in [PLACES["settle_steps"]])
