"""`fp8watch runs list|show|release`."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from fp8watch import action_words, run_words
from fp8watch.commands import stores
from fp8watch.commands.output import not_found, print_json, print_table
from fp8watch.commands.stores import DirOption, FolderOption, JsonOption

if TYPE_CHECKING:
    from fp8watch.records import CheckpointRecord

app = typer.Typer(help="Runs under FP8WATCH_DIR and, of a cluster, in FP8WATCH_REDIS_URL.", no_args_is_help=True)


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


@app.command("list")
def list_runs(directory: DirOption = None, as_json: JsonOption = False) -> None:
    """List all runs, oldest first."""
    found = stores.runs(stores.folder(directory))
    if as_json:
        print_json([{"store": item.store} | _summary(item) for item in found])
        return
    if not found:
        typer.echo(f"no runs {stores.looked(stores.folder(directory))} ({stores.WHERE})")
        return
    rows = [
        (r.run, r.state, r.last_step, r.hello.policy_name, _time(r.started_unix), run_words.reason(r))
        for r in (item.record for item in found)
    ]
    print_table("Runs", ["run", "state", "last step", "policy", "started", "reason"], rows)


def _summary(item: stores.Found) -> dict[str, object]:
    record = item.record
    return {
        "run": record.run,
        "state": record.state,
        "last_step": record.last_step,
        "policy": record.hello.policy_name,
        "world_size": record.hello.world_size,
        "started_unix": record.started_unix,
        "updated_unix": record.updated_unix,
        "reason": record.reason,
    }


@app.command()
def show(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run; default: the newest.")] = None,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one run: what it is, what was found and done, and its checkpoints."""
    from fp8watch.commands import coverage
    from fp8watch.records import ActionRecord, CheckpointRecord, Finding

    found = stores.find(stores.folder(directory), run)
    name = found.record.run
    with stores.reading(found) as store:
        findings = list(store.read(name, Finding))
        actions = list(store.read(name, ActionRecord))
        checkpoints = list(store.read(name, CheckpointRecord))
        seen = coverage.of_run(store, name)
    if as_json:
        document = {"store": found.store, "record": found.record, "findings": findings}
        print_json(document | {"actions": actions, "checkpoints": checkpoints})
        return
    hello = found.record.hello
    rows = [
        ("state", run_words.state(found.record)),
        ("last step", found.record.last_step),
        ("ranks", hello.world_size),
        ("host", hello.host),
        ("policy", hello.policy_name),
        ("FP8 modules", "no layout announced" if seen is None else seen.text()),
        ("framework", ", ".join(f"{key} {value}" for key, value in hello.framework.items())),
        ("not available", "; ".join(f"{key}: {why}" for key, why in sorted(hello.capabilities.items()) if why)),
        ("findings", _counted(f"{item.detector} {item.severity}" for item in findings)),
        ("actions", _counted(action_words.brief(item) for item in actions)),
        ("store", found.store),
    ]
    print_table(f"Run {name}", ["", ""], rows)
    marks = [(c.checkpoint, c.step, c.attempt, _label(c), c.reason) for c in checkpoints]
    print_table("Checkpoints", ["checkpoint", "step", "attempt", "label", "reason"], marks)


def _label(saved: CheckpointRecord) -> str:
    """Its label, unless rotation has removed it: there is nothing left to go back to."""
    return saved.label if saved.path else f"removed (was {saved.label})"


def _counted(names: object) -> str:
    counts = Counter(names)  # type: ignore[call-overload]
    return "; ".join(f"{count} x {name}" for name, count in counts.items())


@app.command()
def release(run: Annotated[str, typer.Argument(metavar="RUN", help="Run.")], directory: FolderOption = None) -> None:
    """Let a run that was halted be started again."""
    from fp8watch.controller import markers

    try:
        was_halted = markers.release(stores.folder(directory), run)
    except OSError as error:
        typer.echo(f"{run} cannot be released: {stores.folder(directory)}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from error
    if not was_halted:
        raise not_found(f"run {run!r} is not halted under {stores.folder(directory)}")
    typer.echo(f"{run} may be started again")
