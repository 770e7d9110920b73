"""`fp8watch agent`: one process that receives frames, exports metrics and runs the controller.

With `--embedded` a training process starts it for one run, and it ends with that run. Without, it stays and serves
every run that connects. With `--redis` it makes no decisions and forwards frames to the cluster's controller.
"""

from __future__ import annotations

import logging
import os
import socket as host_name
from pathlib import Path
from typing import Annotated

import typer

from fp8watch.commands import values
from fp8watch.errors import EXIT_BAD_INPUT, BadInput
from fp8watch.settings import from_environment
from fp8watch.transport.channel import agent_address
from fp8watch_agent import program
from fp8watch_agent.options import AgentOptions

DEFAULT_SOCKET = "unix:///run/fp8watch/agent.sock"

app = typer.Typer(
    help="Receive frames of training ranks, export metrics, find and act.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def agent(
    socket: Annotated[
        str | None, typer.Option(parser=values.text, metavar="SOCKET", help="Socket to serve; default: FP8WATCH_AGENT.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", parser=values.folder, metavar="FOLDER", help="FP8WATCH_DIR.")
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of /metrics.")] = "127.0.0.1",
    metrics_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of /metrics; 0: a free one.")] = None,
    series_budget: Annotated[
        int, typer.Option(min=100, max=10_000_000, help="Series shown at most, all runs together.")
    ] = 5000,
    worst_layers: Annotated[
        int, typer.Option(min=0, max=100_000, help="Layers of a run with series of their own.")
    ] = 10,
    embedded: Annotated[bool, typer.Option(help="Serve one run and end with it.")] = False,
    run: Annotated[str | None, typer.Option(help="The run (embedded).")] = None,
    parent_pid: Annotated[int | None, typer.Option(min=1, help="Process of the trainer (embedded).")] = None,
    end_grace_seconds: Annotated[
        float | None,
        typer.Option(parser=values.seconds, metavar="SECONDS", help="Wait after the last rank has ended, then end."),
    ] = None,
    connect_seconds: Annotated[
        float | None,
        typer.Option(parser=values.seconds, metavar="SECONDS", help="Longest wait for the first rank (embedded)."),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(parser=values.text, metavar="URL", help="Redis of the cluster; default: FP8WATCH_REDIS_URL."),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            parser=values.name, metavar="NAME", help="This node's name; default: FP8WATCH_NODE, else the host."
        ),
    ] = None,
    any_user: Annotated[
        bool, typer.Option(help="Serve every user of the node; a run belongs to who starts it.")
    ] = False,
    log_level: Annotated[
        str | None, typer.Option(parser=values.log_level, metavar="LEVEL", help="Level of the log on stderr.")
    ] = None,
) -> None:
    """Serve until told to stop (SIGTERM), or embedded until the run ends."""
    try:
        settings = from_environment()
    except BadInput as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    if embedded and not (run and socket):
        raise typer.BadParameter("--embedded needs --run and --socket")
    logging.basicConfig(level=log_level or settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    home = directory if directory is not None else settings.dir
    try:
        address = _socket(socket or settings.agent or DEFAULT_SOCKET)
    except BadInput as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    options = AgentOptions(
        socket=address,
        directory=home.absolute(),
        run=run if embedded else None,
        parent_pid=parent_pid,
        any_user=any_user and not embedded,
        metrics_host=metrics_host,
        metrics_port=settings.metrics_port if metrics_port is None else metrics_port,
        end_grace_seconds=settings.end_grace_seconds if end_grace_seconds is None else end_grace_seconds,
        connect_seconds=settings.connect_seconds if connect_seconds is None else connect_seconds,
        series_budget=series_budget,
        worst_layers=worst_layers,
        store_full_steps=settings.store_full_steps,
        store_limit_bytes=settings.store_limit_bytes,
        redis_url=redis or (settings.redis_url.get_secret_value() if settings.redis_url is not None else None),
        node=node or settings.node or host_name.gethostname(),
        spool_limit_bytes=settings.spool_limit_bytes,
        redis_keep_seconds=settings.redis_keep_seconds,
    )
    code = program.run(options)
    if code:
        raise typer.Exit(code)


def _socket(address: str) -> Path:
    return Path(os.path.abspath(address)) if "://" not in address else agent_address(address)
