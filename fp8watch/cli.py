"""`fp8watch`: the command line. Works without torch; what a sub-command needs is imported when it is called."""

from __future__ import annotations

import sys

import typer

from fp8watch import __version__
from fp8watch.errors import BadInput, Fp8watchError


def build() -> typer.Typer:
    """The whole command line."""
    from fp8watch.commands import actions, disarm, doctor, incidents, metrics, mounted, policy, runs

    app = typer.Typer(
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

    app.command("metrics")(metrics.command)
    app.add_typer(policy.app, name="policy")
    app.add_typer(runs.app, name="runs")
    app.add_typer(incidents.app, name="incident")
    app.add_typer(actions.app, name="actions")
    app.command("disarm")(disarm.command)
    app.command("doctor")(doctor.command)
    mounted.mount(app)
    return app


def main() -> None:
    """Entry point. Bad input is printed line by line and ends with 2."""
    try:
        build()(prog_name="fp8watch")
    except BadInput as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        raise SystemExit(2) from None
    except Fp8watchError as error:
        print(f"fp8watch: {error}", file=sys.stderr)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main()
