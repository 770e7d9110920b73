"""`fp8watch`: the command line. It works without torch; a sub-command's imports happen when it is called."""

from __future__ import annotations

import contextlib
import os
import sys

import typer

from fp8watch import __version__
from fp8watch.errors import EXIT_BAD_INPUT, EXIT_UNREACHABLE, BadInput, Fp8watchError, OutputFailed, Unreachable

FIRST, RUNS, SERVICES = "Try it, check it, rehearse it", "Runs and what was done", "Services and metrics"
"""Headings under which `--help` lists the commands."""


def build() -> typer.Typer:
    """The whole command line."""

    from fp8watch.commands import actions, disarm, doctor, incidents, metrics, mounted, policy, runs
    from fp8watch.commands.tidy import TidyGroup

    app = typer.Typer(
        cls=TidyGroup,
        help="Keeps FP8 training runs healthy: watches scales, finds the cause, acts and verifies.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def version(value: bool) -> None:
        if value:
            typer.echo(f"fp8watch {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        show_version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print it."),
    ) -> None:
        pass

    mounted.mount(app, ["demo"], FIRST)
    app.command("doctor", rich_help_panel=FIRST)(doctor.command)
    mounted.mount(app, ["replay"], FIRST)
    app.add_typer(policy.app, name="policy", rich_help_panel=FIRST)
    app.add_typer(runs.app, name="runs", rich_help_panel=RUNS)
    app.add_typer(incidents.app, name="incident", rich_help_panel=RUNS)
    app.add_typer(actions.app, name="actions", rich_help_panel=RUNS)
    app.command("disarm", rich_help_panel=RUNS)(disarm.command)
    app.command("metrics", rich_help_panel=SERVICES)(metrics.command)
    mounted.mount(app, None, SERVICES)
    return app


def main() -> None:
    """Entry point. Bad input is printed line by line, with exit code 2."""
    try:
        build()(prog_name="fp8watch")
    except BadInput as error:  # what does not answer is reported in the same way
        for problem in error.problems:
            print(problem, file=sys.stderr)
        raise SystemExit(EXIT_UNREACHABLE if isinstance(error, Unreachable) else EXIT_BAD_INPUT) from None
    except OutputFailed as error:
        raise SystemExit(_cut_off(error)) from None
    except Fp8watchError as error:
        print(f"fp8watch: {error}", file=sys.stderr)
        raise SystemExit(3) from None
    except OSError as error:  # a full disk, or a folder that has gone
        raise SystemExit(_cut_off(OutputFailed(error) if error.filename is None else error)) from None


def _cut_off(error: Exception) -> int:
    """Report why output ended early (unless the reader closed the pipe), and keep the exit from writing any more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, OutputFailed) and error.is_unread:
        return 0
    print(f"fp8watch: {error}", file=sys.stderr)
    return 3


if __name__ == "__main__":
    main()
