"""The settings reference page: `python -m fp8watch_dashboards.settings_page` writes `docs/settings.md`.

The description of a setting is its docstring in `fp8watch/settings.py`, so that page and code cannot diverge.
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

This page is generated from `fp8watch/settings.py` and the console's options by
`python -m fp8watch_dashboards.settings_page`. An empty variable counts as not set. All invalid variables are reported
together (a command then ends with exit code 2). Command line options and arguments of `attach` take precedence. "None"
describes the behaviour if a variable is not set. A switch accepts `1`, `0`, `true` and `false`.

Training processes, agents, controllers and commands read the same variables, each those that it uses. Which process
needs which key is in [SECURITY.md](../SECURITY.md).
"""
_CONSOLE = """\
## The console

Options of `fp8watch console` that can also be set by a variable:
"""
_COMPOSE = """\
## docker-compose.yml

| variable | default | meaning |
| --- | --- | --- |
| `FP8WATCH_UID` | `1000` | User of the containers. Training has to run as the same user: the socket accepts no other. |
| `FP8WATCH_GID` | `1000` | Group of the containers. |
"""
_HEAD = "| variable | default | meaning |\n| --- | --- | --- |\n"


def text() -> str:
    """The page: one table each for the settings (in their order), the console's options and the compose file."""
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
    """(name, docstring on one line) of every field of a class that has a docstring."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as meaning)):
                yield name, " ".join(meaning.split())


def main() -> None:
    """Write the page and print its path."""
    FILE.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")


def _row(variable: str, default: Any, meaning: str) -> str:
    shown = "" if default is None else f"`{int(default) if isinstance(default, bool) else default}`"
    escaped = meaning.replace("|", "\\|")
    return f"| `{variable}` | {shown} | {escaped} |\n"


if __name__ == "__main__":
    main()
