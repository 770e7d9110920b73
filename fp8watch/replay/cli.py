"""`fp8watch replay PATH... [--policy FILE] --format jsonl|table`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fp8watch.errors import EXIT_BAD_INPUT, BadInput
from fp8watch.policy.load import load
from fp8watch.replay.run import replay


class OutFormat(StrEnum):
    """How findings are printed."""

    JSONL = "jsonl"
    TABLE = "table"


def command(
    paths: Annotated[list[Path], typer.Argument(help="Logs, event folders or stores.", metavar="PATH...")],
    policy: Annotated[str | None, typer.Option(help="Policy file or name: also print what it would propose.")] = None,
    out_format: Annotated[OutFormat, typer.Option("--format", help="One JSON object a line, or a table.")] = (
        OutFormat.TABLE
    ),
) -> None:
    """Run the detectors over recorded runs: what would have been found, when, and why."""
    try:
        chosen = load(policy) if policy is not None else None
    except BadInput as error:
        for problem in error.problems:
            typer.echo(problem, err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    code = replay(paths, chosen, out_format.value)
    if code:
        raise typer.Exit(code)
