"""`fp8watch console`: serves the Streamlit console, on loopback or with TLS."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fp8watch.commands import stores, values
from fp8watch.commands.stores import FolderOption
from fp8watch.errors import EXIT_BAD_INPUT, BadInput, MissingDependency
from fp8watch.security import PURPOSES
from fp8watch_dashboards.listening import Listening

SECRETS = frozenset(
    {f"FP8WATCH_{purpose.upper()}_KEY{suffix}" for purpose in PURPOSES for suffix in ("", "_FILE")}
    | {"FP8WATCH_REDIS_URL", "FP8WATCH_METRICS_TLS_KEY", "FP8WATCH_METRICS_PASSWORD_FILE"}
)
"""Variables that the console does not need and an intruder must not find. (The Redis URL may contain a password.)"""

app = typer.Typer(
    help="Serve the console: runs, loss, head-room, findings and actions.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def command_line(listening: Listening) -> list[str]:
    """The command that starts Streamlit: no browser, no usage statistics, no file watcher, one address."""
    script = Path(__file__).with_name("app.py")
    options = {
        "server.headless": "true",
        **listening.options(),
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "streamlit", "run", str(script), *flags]


def environment(given: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The server's environment: it only reads stores, so it gets neither signing keys nor the address of Redis."""
    kept = {name: value for name, value in given.items() if name not in SECRETS}
    return {**kept, "FP8WATCH_DIR": str(directory)}


@app.callback(invoke_without_command=True)
def console(
    directory: FolderOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. The console has no login: use loopback or a proxy with one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8501,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            parser=values.file,
            metavar="FILE",
            envvar="FP8WATCH_CONSOLE_TLS_CERT",
            help="Certificate chain (PEM): serve https.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            parser=values.file,
            metavar="FILE",
            envvar="FP8WATCH_CONSOLE_TLS_KEY",
            help="Private key of the certificate (PEM).",
        ),
    ] = None,
    allow_plain: Annotated[
        bool,
        typer.Option(
            "--allow-plain",
            envvar="FP8WATCH_CONSOLE_ALLOW_PLAIN",
            help="Serve http on an address other than loopback, for use behind a proxy that adds TLS.",
        ),
    ] = False,
) -> None:
    """Serve the console until interrupted."""
    if importlib.util.find_spec("streamlit") is None:
        raise MissingDependency("streamlit", "dashboards")
    listening = Listening(host=host, port=port, tls_cert=tls_cert, tls_key=tls_key, allow_plain=allow_plain)
    try:
        home = stores.folder(directory).resolve()
        listening.check()
    except BadInput as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    for remark in listening.remarks():
        typer.echo(f"warning: {remark}", err=True)
    typer.echo(f"fp8watch console on {listening.url} reading {home}")
    sys.stdout.flush()
    # This process is replaced, so that what ends it (a terminal, a container runtime) ends the server.
    command = command_line(listening)
    os.execve(command[0], command, environment(os.environ, home))
