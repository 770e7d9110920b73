"""`fp8watch policy check|compare|schema`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fp8watch.commands import values
from fp8watch.commands.output import fail, print_json, print_table
from fp8watch.commands.stores import JsonOption
from fp8watch.errors import BadInput

if TYPE_CHECKING:
    from fp8watch.policy.rungs import Rung
    from fp8watch.policy.schema import Policy, Rule

LEGEND = (
    "apart at: first step at which the two policies answer differently; - beside the first policy: they never do.\n"
    "found, apart at: once for each run, beside its first policy; both policies are given the same findings."
)
app = typer.Typer(help="Check policy files, and describe them to editors.", no_args_is_help=True)


@app.command()
def check(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A file, or the name of a shipped policy.")],
    as_json: JsonOption = False,
) -> None:
    """Check a policy and print the settings in force; exit 2 with every error if it is not valid."""
    from fp8watch.policy.load import check as load_checked

    try:
        loaded = load_checked(policy)
    except BadInput as error:
        raise fail(error) from error
    if as_json:
        print_json(loaded.model_dump(mode="json"))
        return
    budgets = ", ".join(f"{name} {value}" for name, value in loaded.budgets.model_dump().items())
    typer.echo(f"{policy}: valid; mode {loaded.mode}; {budgets}; healthy_steps {loaded.healthy_steps}")
    rows = [
        (
            rule.name,
            loaded.rule_mode(rule),
            ", ".join(rule.when.detector),
            rule.when.severity,
            ", ".join(rule.when.cause or ("any",)),
            " -> ".join(_rung(loaded, rule, rung) for rung in rule.ladder) or "note only",
        )
        for rule in loaded.rules
    ]
    print_table("Rules", ["rule", "mode", "detector", "severity", "cause", "ladder"], rows)


def _rung(policy: Policy, rule: Rule, rung: Rung) -> str:
    """Its action, and its mode where that is lower than its rule's."""
    mode = policy.rung_mode(rule, rung)
    return rung.action if mode == policy.rule_mode(rule) else f"{rung.action} ({mode})"


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="POLICY", help="A policy: file or name.")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Another one.")],
    paths: Annotated[
        list[str], typer.Argument(help="Recorded runs: paths or names, whatever `replay` reads.", metavar="PATH...")
    ],
    assume: values.AssumeOption = values.Outcome.HELPED,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, max=values.MAX_COUNT, help="Steps between checkpoints, of logs. 0: none.")
    ] = 0,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, max=values.MAX_COUNT, help="Steps of warm-up, of logs.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Rehearse two policies on the same runs: what each would have done, and at what cost."""
    from fp8watch.policy import load
    from fp8watch.replay import compare as comparing
    from fp8watch.replay.recording import NOTE
    from fp8watch.replay.run import Assumptions

    if first == second:
        raise fail(BadInput([f"command line:1: policies: {first} is compared with itself"]))
    policies, wrong = {}, []
    for name in (first, second):
        try:
            policies[name] = load(name)
        except BadInput as error:
            wrong += error.problems
    if wrong:
        raise fail(BadInput(wrong))
    assumptions = Assumptions(
        outcome=assume.value,
        checkpoint_every=checkpoint_every,
        warmup_steps=warmup_steps,
    )
    notes: list[str] = []
    runs, problems = comparing.compare(policies, paths, assumptions, notes)
    if as_json:
        print_json(comparing.as_json(runs, list(policies)))
    elif runs:
        columns = ["run", "found", "policy", "done", "steps replayed", "asked", "proposed", "in the way", "apart at"]
        print_table(f"Assuming that remedies {'help' if assume is values.Outcome.HELPED else 'do nothing'}", columns,
                    comparing.rows(runs, list(policies)))  # fmt: skip
        typer.echo(LEGEND)
    for note in notes:
        typer.echo(f"{NOTE}{note}", err=True)
    if problems:
        raise fail(BadInput(problems))


@app.command()
def schema() -> None:
    """Print the JSON Schema of the policy file."""
    from fp8watch.policy.load import json_schema

    sys.stdout.write(json_schema() + "\n")
