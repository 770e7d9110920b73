"""`fp8watch replay PATH... [--policy FILE] --format jsonl|table`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fp8watch.commands import values
from fp8watch.errors import EXIT_BAD_INPUT, BadInput
from fp8watch.policy.load import load
from fp8watch.replay.run import Assumptions, replay


class OutFormat(StrEnum):
    """How findings are printed."""

    JSONL = "jsonl"
    TABLE = "table"


CheckpointOption = Annotated[
    int,
    typer.Option(
        min=0, max=values.MAX_COUNT, help="Steps between checkpoints, of logs that do not say when they saved. 0: none."
    ),
]
WarmupOption = Annotated[
    int | None, typer.Option(min=0, max=values.MAX_COUNT, help="Steps of warm-up, of logs that do not say.")
]


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Logs, folders of them, stores, bundles, a Redis (redis://...), or names of runs under FP8WATCH_DIR.",
            metavar="PATH...",
        ),
    ],
    policy: Annotated[str | None, typer.Option(help="Policy file or name: also print what it would do.")] = None,
    out_format: Annotated[OutFormat, typer.Option("--format", help="One JSON object a line, or a table.")] = (
        OutFormat.TABLE
    ),
    assume: values.AssumeOption = values.Outcome.HELPED,
    checkpoint_every: CheckpointOption = 0,
    warmup_steps: WarmupOption = None,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="The decision log of fp8watch's own runs, as its replay writes it.")
    ] = False,
    run: Annotated[str | None, typer.Option("--run", help="Of what holds several runs, this one only.")] = None,
) -> None:
    """Run the detectors over recorded runs: what would have been found, when, and why."""
    try:
        chosen = load(policy) if policy is not None else None
    except BadInput as error:
        for problem in error.problems:
            typer.echo(problem, err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    assumptions = Assumptions(
        outcome=assume.value,
        checkpoint_every=checkpoint_every,
        warmup_steps=warmup_steps,
    )
    code = replay(paths, chosen, out_format.value, assumptions=assumptions, decisions=decisions, run=run)
    if code:
        raise typer.Exit(code)
