"""How listings are printed: a table for people, JSON for programs, never both on one stream."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import typer

from fp8watch.errors import EXIT_BAD_INPUT, EXIT_UNREACHABLE, BadInput, Unreachable


def plain(value: Any) -> Any:
    """A record in a form that JSON can hold: NaN and infinity become text, bytes are left out."""
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if not isinstance(item, bytes)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout; absent values are shown as a dash, never as 0."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    count = 0
    for row in rows:
        count += 1
        # Text, not markup: names from a run may contain brackets.
        table.add_row(*(Text("-" if cell is None or cell == "" else str(cell)) for cell in row))
    # In a pipe or file a table is as wide as it needs to be, so that nothing is cut off.
    console = Console(width=None if sys.stdout.isatty() else 250)
    if count:
        console.print(table)
    else:
        console.print(Text(f"{title}: none"))


def fail(error: BadInput) -> typer.Exit:
    """Print all problems on stderr, one per line; returns the exit to raise."""
    for problem in error.problems:
        typer.echo(problem, err=True)
    return typer.Exit(EXIT_UNREACHABLE if isinstance(error, Unreachable) else EXIT_BAD_INPUT)


def not_found(message: str) -> typer.Exit:
    """Print that something does not exist; returns the exit (3) to raise."""
    typer.echo(message, err=True)
    return typer.Exit(EXIT_UNREACHABLE)
