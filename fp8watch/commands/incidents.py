"""`fp8watch incident list|show`: findings of one event, and what was done about it."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import typer

from fp8watch.commands import stores
from fp8watch.commands.output import not_found, print_json, print_table
from fp8watch.commands.stores import DirOption, JsonOption
from fp8watch.records import ActionRecord, Finding

app = typer.Typer(help="Incidents: what was found, why, and what came of it.", no_args_is_help=True)
RunOption = Annotated[str | None, typer.Option("--run", help="Run; default: the newest.")]


@app.command("list")
def list_incidents(run: RunOption = None, directory: DirOption = None, as_json: JsonOption = False) -> None:
    """List the incidents of a run."""
    found = stores.find(stores.folder(directory), run)
    grouped: dict[str, list[Finding]] = defaultdict(list)
    answers: dict[str, list[ActionRecord]] = defaultdict(list)
    with stores.reading(found) as store:
        for finding in store.read(found.record.run, Finding):
            grouped[finding.incident or finding.id].append(finding)
        for action in store.read(found.record.run, ActionRecord):
            answers[action.incident].append(action)
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
        done = ", ".join(f"{action.action} {action.status}" for action in answers[name])
        rows.append(
            (name, last.severity, last.detector, last.cause, items[0].onset_step, items[0].step, last.tensor, done)
        )
    columns = ["incident", "severity", "detector", "cause", "since", "found", "tensor", "actions"]
    print_table(f"Incidents of {found.record.run}", columns, rows)


@app.command()
def show(
    incident: Annotated[str, typer.Argument(help="Incident.")],
    run: RunOption = None,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one incident: its findings with their evidence, and its actions."""
    found = stores.find(stores.folder(directory), run)
    with stores.reading(found) as store:
        findings = [item for item in store.read(found.record.run, Finding) if incident in (item.incident, item.id)]
        actions = [item for item in store.read(found.record.run, ActionRecord) if item.incident == incident]
    if not findings:
        raise not_found(f"no incident {incident!r} in run {found.record.run}")
    if as_json:
        print_json({"incident": incident, "run": found.record.run, "findings": findings, "actions": actions})
        return
    for finding in findings:
        rows: list[tuple[str, object]] = [
            ("found at step", finding.step),
            ("since step", finding.onset_step),
            ("cause", finding.cause),
            ("tensor", finding.tensor),
            ("layers", ", ".join(finding.layers)),
            ("rank", finding.rank),
        ]
        rows += [(str(key), value) for key, value in finding.evidence.items()]
        print_table(f"{finding.id}: {finding.severity} {finding.detector}", ["", ""], rows)
    done = [(a.id, a.action, a.status, a.readback, a.outcome, a.reason) for a in actions]
    print_table("Actions", ["id", "action", "status", "read back", "outcome", "reason"], done)
