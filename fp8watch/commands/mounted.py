"""Sub-commands that live elsewhere and are imported only when they are called, so that `--help` stays fast.

`replay` and `demo` belong to this package; agent, console and others are found in the entry-point group
`fp8watch.commands`, so that the library never imports a deployable package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import typer

from fp8watch.commands.output import not_found
from fp8watch.commands.tidy import tidy

GROUP = "fp8watch.commands"
OWN = {
    "controller": ("fp8watch.commands.controller", "Decide for all runs of a cluster, or stand by."),
    "demo": ("fp8watch.demo.cli", "Train a small GPT in FP8, break it, and watch it being saved."),
    "replay": ("fp8watch.replay.cli", "Find in recorded runs what would have been found live."),
}
HELP = {"agent": "Receive frames, export metrics, find and act.", "console": "Serve the Streamlit console."}
_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def mount(app: typer.Typer, names: Sequence[str] | None, panel: str) -> None:
    """Add commands of this package by name; None: all that are not added yet, and those of other packages."""
    there = {command.name for command in app.registered_commands}
    for name in OWN if names is None else names:
        if name not in there:
            module, text = OWN[name]
            _add(app, name, text, lambda module=module: importlib.import_module(module), panel)  # type: ignore[misc]
    if names is not None:
        return
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda item: item.name):
        if entry.name not in OWN:
            _add(app, entry.name, HELP.get(entry.name, f"From {entry.value.partition(':')[0]}."), entry.load, panel)


def _add(app: typer.Typer, name: str, text: str, load: Callable[[], Any], panel: str) -> None:
    def run(context: typer.Context) -> None:
        try:
            target = load()
        except ImportError as error:
            raise not_found(f"fp8watch {name} is not installed here: {error}") from error
        invoke(target, context.args, f"fp8watch {name}")

    run.__doc__ = text
    app.command(name, context_settings=_SETTINGS, rich_help_panel=panel)(run)


def invoke(target: Any, arguments: Sequence[str], name: str) -> None:
    """Run a Typer app, a click command, a function for Typer, or a module that contains one of them."""
    command = tidy(_command(target))
    command.main(args=list(arguments), prog_name=name, standalone_mode=True)


def _command(target: Any) -> Any:
    for attribute in ("app", "command", "demo", "main"):
        if not callable(target) and hasattr(target, attribute):
            target = getattr(target, attribute)
            break
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    if hasattr(target, "main") and hasattr(target, "make_context"):
        return target
    app = typer.Typer(add_completion=False)
    app.command()(target)
    return typer.main.get_command(app)
