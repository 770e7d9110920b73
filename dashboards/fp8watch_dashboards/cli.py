"""`fp8watch console`: serve the Streamlit console on loopback."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fp8watch.errors import MissingDependency

app = typer.Typer(
    help="Serve the console: runs, loss, head-room, findings and actions.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def command_line(*, host: str, port: int) -> list[str]:
    """How Streamlit is started: no browser, no usage statistics, no file watcher, one address."""
    script = Path(__file__).with_name("app.py")
    options = {
        "server.headless": "true",
        "server.address": host,
        "server.port": str(port),
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "streamlit", "run", str(script), *flags]


@app.callback(invoke_without_command=True)
def console(
    directory: Annotated[Path, typer.Option("--dir", envvar="FP8WATCH_DIR", help="Folder that holds the runs.")] = Path(
        ".fp8watch"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on. The console has no login: keep it on loopback or behind one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8501,
) -> None:
    """Serve the console until interrupted."""
    if importlib.util.find_spec("streamlit") is None:
        raise MissingDependency("streamlit", "dashboards")
    environment = {**os.environ, "FP8WATCH_DIR": str(directory.resolve())}
    typer.echo(f"fp8watch console on http://{host}:{port} reading {directory.resolve()}")
    sys.stdout.flush()
    # Replaced, not started beside: whoever ends this process (a terminal, a container's runtime) ends the server.
    command = command_line(host=host, port=port)
    os.execve(command[0], command, environment)
