"""What options of the command line take, where typer's own bounds do not say it: each refuses with exit code 2."""

from __future__ import annotations

import math
from pathlib import Path

import typer

MAX_COUNT = 10_000_000
"""Of steps, as in a policy: more is a slip of the finger."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def seconds(value: str | float) -> float:
    """More than 0 and at most what a setting may be. (Typer's bounds let `nan` through.)"""
    from fp8watch.settings import MAX_WAIT_SECONDS

    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 < number <= MAX_WAIT_SECONDS:
        raise typer.BadParameter(f"{value!r} is no number of seconds above 0 and up to {MAX_WAIT_SECONDS:g}")
    return number


def folder(value: str | Path) -> Path:
    """A folder; an empty text is a variable that was not set, and not the current folder."""
    if not str(value):
        raise typer.BadParameter("empty; the current folder is '.'")
    return Path(value)


def file(value: str | Path) -> Path:
    """A file; an empty text is a variable that was not set."""
    return Path(text(str(value)))


def text(value: str) -> str:
    """Any text but an empty one, which would pass for an option that was not given."""
    if not value:
        raise typer.BadParameter("empty; leave the option out for its default")
    return value


def log_level(value: str) -> str:
    """A level of Python's logging, in any case."""
    if value.upper() not in LEVELS:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(LEVELS)}")
    return value.upper()
