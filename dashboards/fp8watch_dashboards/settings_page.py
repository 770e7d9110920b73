"""The environment variables as a page: `python -m fp8watch_dashboards.settings_page` writes `docs/settings.md`.

What a setting says of itself is its docstring in `fp8watch/settings.py`, so that page and code cannot part.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.core
import typer.main

from fp8watch.settings import Settings
from fp8watch_dashboards.cli import app as console

FILE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_INTRODUCTION = """\
# Settings

This page is written from `fp8watch/settings.py` and the console's options by
`python -m fp8watch_dashboards.settings_page`. A variable that is empty counts as not set; one that is wrong is named,
with all others that are (a command ends with exit code 2). What a command line or `attach` is given wins. "None" is
what holds where nothing is set; a switch takes `1` and `0`, and `true` and `false`.

Training processes, agents, controllers and commands read the same variables, each what it has a use for. Who holds
which key is in [SECURITY.md](../SECURITY.md).
"""
_CONSOLE = """\
## The console

Options of `fp8watch console` that can also be given so:
"""
_COMPOSE = """\
## docker-compose.yml

| variable | default | what it says |
| --- | --- | --- |
| `FP8WATCH_UID` | `1000` | User of the containers, as whom training has to run: the socket takes no other's. |
| `FP8WATCH_GID` | `1000` | Its group. |
"""
_HEAD = "| variable | default | what it says |\n| --- | --- | --- |\n"


def text() -> str:
    """The page: a table of the settings in their order, one of the console's, one of the compose file's."""
    meanings = dict(field_docstrings(Settings))
    settings = [
        _row(f"FP8WATCH_{name.upper()}", field.default, meanings[name]) for name, field in Settings.model_fields.items()
    ]
    options = [
        _row(str(option.envvar), option.default, f"`{option.opts[0]}`: {option.help}")
        for option in typer.main.get_command(console).params
        if isinstance(option, typer.core.TyperOption) and option.envvar
    ]
    return "\n".join([_INTRODUCTION, _HEAD + "".join(settings), _CONSOLE, _HEAD + "".join(options), _COMPOSE])


def field_docstrings(owner: type) -> Iterator[tuple[str, str]]:
    """(field, the string below it) of a class, each on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as meaning)):
                yield name, " ".join(meaning.split())


def main() -> None:
    """Write the page; prints where."""
    FILE.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")


def _row(variable: str, default: Any, meaning: str) -> str:
    shown = "" if default is None else f"`{int(default) if isinstance(default, bool) else default}`"
    escaped = meaning.replace("|", "\\|")
    return f"| `{variable}` | {shown} | {escaped} |\n"


if __name__ == "__main__":
    main()
