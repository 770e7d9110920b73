"""`fp8watch disarm [RUN | --all] [--undo]`: stop all acting at once; watching goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8watch.commands import stores
from fp8watch.commands.output import not_found
from fp8watch.commands.stores import DirOption
from fp8watch.errors import Unreachable


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run; default: the newest.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All runs under the folder, including later ones.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Allow acting again.")] = False,
    directory: DirOption = None,
) -> None:
    """Let nothing act from the next step boundary on. What all ranks have already agreed on is still applied."""
    from fp8watch.controller import markers

    if every and run is not None:
        raise typer.BadParameter(f"either --all or {run!r}", param_hint="RUN")
    home = stores.folder(directory)
    name = None if every else _name(home, run)
    what = "all runs" if name is None else name
    try:
        if not undo:
            typer.echo(f"{what}: disarmed by {markers.disarm(home, name)}")
        elif markers.rearm(home, name):
            typer.echo(f"{what}: armed again")
        else:
            typer.echo(f"{what}: was not disarmed")
    except OSError as error:
        raise not_found(f"{home} cannot be written: {error}; set FP8WATCH_DISARM=1 for the run instead") from error
    finally:  # whatever one of the two does not take, the other is told
        for line in stores.disarm_in_redis(name, undo=undo):
            typer.echo(f"{what}: {line}")


def _name(home: Path, run: str | None) -> str:
    """The run that is meant. One that is named is stopped here also while Redis, which may know it, does not answer."""
    if run is not None:
        try:
            stores.known(home)
        except Unreachable:
            return run
    return stores.find(home, run).record.run
