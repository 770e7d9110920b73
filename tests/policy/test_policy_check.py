"""`policy check` refuses policies that are valid but cannot work, with reason and line, and hostile ones at once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.errors import BadInput
from fp8watch.policy import rungs
from fp8watch.policy.load import check, json_schema, parse, read, shipped
from fp8watch.records import ACTIONS

HEAD = "version: 1\nmode: auto\n"


def faults(text: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        check(text)
    return caught.value.problems


def rule(when: str, *ladder: str, more: str = "", name: str = "a") -> str:
    rungs = "".join(f"      - {{{rung}}}\n" for rung in ladder)
    return f"  - name: {name}\n    when: {{{when}}}\n{more}    ladder:\n{rungs}"


@pytest.mark.parametrize("name", shipped())
def test_shipped_policies_can_work(name: str) -> None:
    check(name)


def test_every_line_of_a_shipped_policy_that_sets_something_is_explained() -> None:
    """By a comment on it, or one above the rule or list that it stands in."""
    for name in shipped():
        text = read(name)[0]
        assert text.startswith("# yaml-language-server: $schema=../policy.schema.json\n"), name
        rules = text.partition("\nrules:")[2].split("\n\n")
        for block in rules:
            if "- name:" in block:
                assert block.partition("- name:")[0].strip(" ,\n").rpartition("\n")[2].lstrip().startswith("#"), block
        for line in text.partition("\nrules:")[0].splitlines():
            if line and not line.startswith("#") and not line.rstrip().endswith(":") and name != "observe":
                assert "#" in line or line.startswith("  "), f"{name}: {line}"


def test_the_four_stability_factors_have_a_rule_each() -> None:
    for name in ("fp8-pretraining", "finetune"):
        actions = {rung.action for item in check(name).rules for rung in item.ladder}
        assert "tighten_clip" in actions, "clipping"
        assert actions & {"rewarm", "lengthen_warmup"}, "warm-up"
        assert "adjust_loss_scale" in actions, "loss scaling"
        assert "checkpoint_cadence" in actions, "checkpoint frequency"


def test_the_conservative_policy_does_by_itself_only_what_is_cheap_and_can_be_undone() -> None:
    policy = check("conservative")
    free = {(item.name, rung.action) for item in policy.rules for rung in item.ladder
            if policy.rung_mode(item, rung) == "auto"}  # fmt: skip
    assert free == {
        ("non-finite", "skip_update"), ("wrong-scales", "repair_scale"), ("wrong-scales", "bf16_layers"),
        ("clipping", "repair_scale"), ("clipping", "bf16_layers"), ("risk", "checkpoint_cadence"),
    }  # fmt: skip
    shares = [rung.max_share for item in policy.rules for rung in item.ladder if rung.action == "bf16_layers"]
    assert max(shares) <= 0.15, "few layers"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("budgets: {actions_per_1000_steps: 0}\nrules:\n" + rule("detector: stuck", "action: hold_lr"),
         "3: budgets.actions_per_1000_steps: 0 actions, and rule a wants to act"),
        ("budgets: {rollbacks_per_24h: 0}\nrules:\n" + rule("detector: stuck", "action: rollback"),
         "3: budgets.rollbacks_per_24h: 0 rollbacks"),
        ("budgets: {rollbacks_per_checkpoint: 0}\nrules:\n" + rule("detector: stuck", "action: rollback"),
         "3: budgets.rollbacks_per_checkpoint: 0 rollbacks"),
        ("rules:\n" + rule("detector: loss_spike", "action: skip_update"),
         "7: rules[0].ladder[0]: skip_update can never be done here: only a non-finite gradient"),
        ("rules:\n" + rule("detector: nonfinite, params_nonfinite: true", "action: skip_update"),
         "7: rules[0].ladder[0]: skip_update can never be done here: parameters"),
        ("rules:\n" + rule("detector: nonfinite", "action: skip_update, max_consecutive: 0"), "max_consecutive is 0"),
        ("rules:\n" + rule("detector: nonfinite", "action: skip_update", more="    mode: approve\n"),
         "8: rules[0].ladder[0]: skip_update can never be done here: the ranks carry it out on the spot"),
        ("rules:\n" + rule("detector: nonfinite", "action: tighten_clip"), "clipping cannot mend a norm"),
        ("rules:\n" + rule("detector: underflow", "action: raise_margin"), "more head-room makes underflow worse"),
        ("rules:\n" + rule("detector: [loss_spike, divergence]", "action: bf16_layers"), "name no layer"),
        ("rules:\n" + rule("detector: loss_spike", "action: repair_scale"), "scope: run mends all"),
        ("rules:\n" + rule("detector: stuck", "action: lengthen_warmup, requires: {in_warmup: false}"),
         "it needs a warm-up that is under way"),
        ("rules:\n" + rule("detector: stuck, tensor: weight", "action: hold_lr"), "5: rules[0].when.tensor: never"),
        ("rules:\n" + rule("detector: loss_spike, layers: a.*", "action: hold_lr"), "5: rules[0].when.layers: never"),
        ("rules:\n" + rule("detector: stuck, params_nonfinite: true", "action: halt"), "params_nonfinite: never holds"),
        ("rules:\n" + rule("detector: stuck", "action: halt", "action: rollback"),
         "8: rules[0].ladder[1]: is never reached: the rung before stops the run"),
        ("rules:\n" + rule("detector: stuck", "action: hold_lr", "action: hold_lr"), "8: rules[0].ladder[1]: is the"),
        ("rules:\n" + rule("detector: [stuck, crest]", "action: hold_lr")
         + rule("detector: stuck, cause: data", "action: halt", name="b"),
         "8: rules[1].name: is never reached: rule a above has all"),
        ("rules:\n" + rule("detector: underflow, cause: precision", "action: adjust_loss_scale, factor: 8.0")
         + rule("detector: [underflow, saturation]", "action: adjust_loss_scale, factor: 0.5", name="b"),
         "11: rules[1].ladder[0]: undoes what rule a does: one raises, the other lowers the loss scale"),
        ("rules:\n" + rule("detector: underflow", "action: adjust_loss_scale, factor: 2.0",
                           "action: adjust_loss_scale, factor: 0.5"),
         "8: rules[0].ladder[1]: undoes what rule a does"),
        ("rules:\n" + rule("detector: stuck", "action: hold_lr, if_loss_above: 0.1"), "no meaning on the first rung"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_work_is_refused_with_reason_and_line(body: str, problem: str) -> None:
    (found,) = faults(HEAD + body)
    assert problem in found.removeprefix("<policy>:")


def test_what_only_observes_may_say_what_it_likes() -> None:
    text = "version: 1\nbudgets: {actions_per_1000_steps: 0}\nrules:\n" + rule("detector: stuck", "action: rollback")
    assert check(text).mode == "observe"


def test_such_a_policy_still_loads_for_a_run() -> None:
    """A rule that never fires must not keep training from starting."""
    # case: SPK-25
    assert parse(HEAD + "budgets: {rollbacks_per_24h: 0}\nrules:\n" + rule("detector: stuck", "action: rollback"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rules:\n" + rule("detector: lossspike", "action: halt"), "did you mean loss_spike?"),
        ("rules:\n" + rule("detector: stuck, cause: optimization", "action: halt"), "did you mean optimisation?"),
        ("rules:\n" + rule("detector: stuck", "action: roll_back"), "did you mean rollback?"),
        ("rules:\n" + rule("detector: stuck", "action: rollback, skip_batch: 3"), "key (did you mean skip_batches?)"),
        ("budget: {}\n", "unknown key (did you mean budgets?)"),
        ("quiet: {still_acts_on: [nonfinit]}\n", "did you mean nonfinite?"),
        ("approval: {timeout_steps: 50}\n", "approval.default: wanted beside the other"),
        ("rules:\n" + rule("detector: stuck", "action: halt", more="    approval: {default: apply}\n"),
         "timeout_steps: wanted beside the other"),
        ("approval: {timeout_steps: 0, default: apply}\n", "at least 1 is wanted, found 0"),
        ("budgets: {when_spent: panic}\n", "when_spent"),
    ],
)  # fmt: skip
def test_names_that_are_nearly_right(text: str, problem: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse("version: 1\n" + text)
    assert any(problem in item for item in caught.value.problems), caught.value.problems


# Hostile texts


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 3000 + "]" * 3000,
        "a: " + "[" * 60_000,
        "a: " + "{a: " * 2000,
        "a: [" * 500,
        "- " * 20_000 + "a",
        "? " * 20_000 + "a",
        "x" * 10_000_000,
        "a: &a [" + "1," * 100 + "]\n" + "\n".join(f"b{i}: &b{i} [*a,*a,*a,*a]" for i in range(2000)),
        "\n".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9 if i else '1')}]" for i in range(60)),
        "\n".join(f"b{i}: &b{i} {{<<: [{', '.join([f'*b{i - 1}'] * 9 if i else '{x: 1}')}]}}" for i in range(30)),
        "rules: &r [*r]",
        "[" + "1," * 30_000 + "]",
    ],
    ids=["nested", "open", "maps", "mixed", "dashes", "queries", "long", "wide", "bomb", "merges", "loop", "items"],
)
def test_a_hostile_text_is_refused_at_once(text: str) -> None:
    began = time.thread_time()
    with pytest.raises(BadInput):
        parse(text)
    assert time.thread_time() - began < 4.0


# The JSON Schema


def schema_file() -> Path:
    return Path(rungs.__file__).parent / "policy.schema.json"


def test_the_published_schema_is_up_to_date() -> None:
    assert schema_file().read_text() == json_schema() + "\n", "write it anew: fp8watch policy schema"
    assert CliRunner().invoke(build(), ["policy", "schema"]).stdout == json_schema() + "\n"


def test_the_schema_takes_what_is_a_policy_and_refuses_what_is_none() -> None:
    schema = json.loads(schema_file().read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert schema["properties"]["version"] == {"const": 1, "title": "Version", "type": "integer"}
    assert schema["$id"].endswith(":1")
    for name in shipped():
        document = YAML(typ="safe").load(read(name)[0])
        assert not list(validator.iter_errors(document)), name
    for bad in ({"version": 2}, {"version": 1, "modus": "auto"}, {"version": 1, "rules": [{"name": "a"}]}):
        assert list(validator.iter_errors(bad)), bad
    text = schema_file().read_text()
    assert all(f'"{action}"' in text for action in ACTIONS)
    assert '"description"' in text, "what an editor shows"
