"""`fp8watch incident list|show|export`: the findings of one event, and what was done about it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from fp8watch import action_words
from fp8watch.commands import stores, values
from fp8watch.commands.output import not_found, print_json, print_table
from fp8watch.commands.stores import DirOption, JsonOption
from fp8watch.records import ActionRecord, Finding
from fp8watch.replay.incident import Incident, find

app = typer.Typer(help="Incidents: what was found, why, and what came of it.", no_args_is_help=True)
RunOption = Annotated[str | None, typer.Option("--run", help="Run; default: the newest.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="Run; default: the newest.")]


@app.command("list")
def list_incidents(
    name: RunArgument = None, run: RunOption = None, directory: DirOption = None, as_json: JsonOption = False
) -> None:
    """List the incidents of a run."""
    found = stores.find(stores.folder(directory), run if name is None else name)
    grouped: dict[str, list[Finding]] = defaultdict(list)
    answers: dict[str, list[ActionRecord]] = defaultdict(list)
    with stores.reading(found) as store:
        for finding in store.read(found.record.run, Finding):
            grouped[finding.incident or finding.id].append(finding)
        for action in store.read(found.record.run, ActionRecord):
            for incident in action.incidents:
                answers[incident].append(action)
    if as_json:
        print_json(
            [
                {
                    "incident": name, "run": found.record.run, "detector": items[-1].detector,
                    "severity": items[-1].severity, "cause": items[-1].cause, "onset_step": items[0].onset_step,
                    "found_step": items[0].step, "tensor": items[-1].tensor, "layers": items[-1].layers,
                    "actions": [action.id for action in answers[name]],
                }
                for name, items in grouped.items()
            ]
        )  # fmt: skip
        return
    rows = []
    for name, items in grouped.items():
        last = items[-1]
        done = "; ".join(action_words.brief(action) for action in answers[name])
        rows.append(
            (name, last.severity, last.detector, last.cause, items[0].onset_step, items[0].step, last.tensor, done)
        )
    columns = ["incident", "severity", "detector", "cause", "since step", "found at", "tensor", "actions"]
    print_table(f"Incidents of {found.record.run}", columns, rows)


IncidentArgument = Annotated[str, typer.Argument(metavar="ID", help="Incident, or one of its findings or actions.")]


@app.command()
def show(
    incident: IncidentArgument, run: RunOption = None, directory: DirOption = None, as_json: JsonOption = False
) -> None:
    """Show one incident: findings with their evidence, every decision about it, the actions, and what they came to."""
    it = _one(incident, run, directory)[0]
    if as_json:
        print_json(
            {
                "incident": it.name, "run": it.record.run, "findings": it.findings, "actions": it.actions,
                "results": it.results, "trace": it.trace,
            }
        )  # fmt: skip
        return
    for line in it.story():
        typer.echo(line)


@app.command()
def export(
    incident: IncidentArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", parser=values.file, metavar="FILE", help="Default: INCIDENT.zip.")
    ] = None,
    run: RunOption = None,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one incident with the frames around it into a file that `fp8watch replay` reads."""
    from fp8watch.replay import bundle

    it, found = _one(incident, run, directory)
    with stores.reading(found) as store:
        path = output or Path(f"{found.record.run}-{it.name}.zip")
        try:
            manifest = bundle.export(store, it, path)
        except OSError as error:
            raise not_found(f"{path} cannot be written: {error.strerror or error}") from error
    if as_json:
        print_json(manifest | {"path": str(path)})
    else:
        typer.echo(f"{path}: {manifest['samples']} steps, {manifest['frames']} frames, {path.stat().st_size} bytes")
    if not manifest["reproduces"]:
        typer.echo(
            "a replay of it does not find exactly the same: frames from before the window are gone from the store, and"
            " with them what the detectors knew",
            err=True,
        )


def _one(name: str, run: str | None, directory: Path | None) -> tuple[Incident, stores.Found]:
    """The incident and its run: the named run, else the newest that has an incident of this id. Exits with 3."""
    newest = stores.find(stores.folder(directory), run)
    others = [] if run is not None else [*reversed(stores.runs(stores.folder(directory)))]
    for found in [newest, *(item for item in others if item.record.run != newest.record.run)]:
        with stores.reading(found) as store:
            it = find(store, found.record, name)
        if it is not None:
            if found is not newest:
                typer.echo(f"of run {found.record.run}, which is not the newest", err=True)
            return it, found
    where = f"in run {run}" if run is not None else "in any run"
    raise not_found(f"no incident, finding or action {name!r} {where}; `fp8watch incident list` names them")
