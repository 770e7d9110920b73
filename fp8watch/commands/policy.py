"""`fp8watch policy check|schema`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fp8watch.commands.output import fail, print_json, print_table
from fp8watch.commands.stores import JsonOption
from fp8watch.errors import BadInput

app = typer.Typer(help="Check policy files, and describe them to editors.", no_args_is_help=True)


@app.command()
def check(
    policy: Annotated[str, typer.Argument(help="A file, or the name of a shipped policy.")],
    as_json: JsonOption = False,
) -> None:
    """Check a policy and print the settings in force; exit 2 with every error if it is not valid."""
    from fp8watch.policy import load

    try:
        loaded = load(policy)
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
            " -> ".join(rung.action for rung in rule.ladder) or "note only",
        )
        for rule in loaded.rules
    ]
    print_table("Rules", ["rule", "mode", "detector", "severity", "cause", "ladder"], rows)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the policy file."""
    from fp8watch.policy.load import json_schema

    sys.stdout.write(json_schema() + "\n")
