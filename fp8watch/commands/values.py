"""Parsers of command-line options, for what typer's own bounds cannot express: each refuses with exit code 2."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Outcome(StrEnum):
    """What is assumed of remedies that a recording could not answer to."""

    HELPED = "helped"
    NOTHING = "nothing"


AssumeOption = Annotated[
    Outcome, typer.Option(help="What is assumed of remedies: each works at once, or none does anything.")
]
MAX_COUNT = 10_000_000
"""Most steps that an option takes, as in a policy: more is a typing error."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def seconds(value: str | float) -> float:
    """A number of seconds above 0, up to the limit of a setting. (Typer's bounds accept `nan`.)"""
    from fp8watch.settings import MAX_WAIT_SECONDS

    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 < number <= MAX_WAIT_SECONDS:
        raise typer.BadParameter(f"{value!r} is no number of seconds above 0 and up to {MAX_WAIT_SECONDS:g}")
    return number


def folder(value: str | Path) -> Path:
    """A folder; empty text is refused, because it is an unset variable and not the current folder."""
    if not str(value):
        raise typer.BadParameter("empty; the current folder is '.'")
    return Path(value)


def file(value: str | Path) -> Path:
    """A file; empty text is refused, because it is an unset variable."""
    return Path(text(str(value)))


def text(value: str) -> str:
    """Any text but an empty one, which would look like an option that was not given."""
    if not value:
        raise typer.BadParameter("empty; leave the option out for its default")
    return value


def name(value: str) -> str:
    """A name of a node."""
    from fp8watch.bounds import MAX_NAME_LENGTH

    if len(value) > MAX_NAME_LENGTH:
        raise typer.BadParameter(f"{len(value)} characters; a name has at most {MAX_NAME_LENGTH}")
    return text(value)


def log_level(value: str) -> str:
    """A level of Python's logging, in upper or lower case."""
    if value.upper() not in LEVELS:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(LEVELS)}")
    return value.upper()
