"""`fp8watch actions list|approve|refuse`."""

from __future__ import annotations

import contextlib
import getpass
import sqlite3
import time
from typing import Annotated, Literal

import typer

from fp8watch.commands import stores
from fp8watch.commands.output import not_found, print_json, print_table
from fp8watch.commands.stores import DirOption, JsonOption
from fp8watch.controller.store import Approval
from fp8watch.controller.store_sqlite import SqliteStore
from fp8watch.records import ActionRecord

app = typer.Typer(help="What was done or proposed, and what waits for a person.", no_args_is_help=True)
RunOption = Annotated[str | None, typer.Option("--run", help="Run; default: the newest.")]
IdArgument = Annotated[str, typer.Argument(help="Id of an action that waits.")]


@app.command("list")
def list_actions(
    run: RunOption = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only what waits for a person.")] = False,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the actions of a run in the order they were decided."""
    found = stores.find(stores.folder(directory), run)
    with stores.reading(found) as store:
        actions = list(store.read(found.record.run, ActionRecord))
    if waiting:
        actions = [action for action in actions if action.status == "waiting"]
    if as_json:
        print_json(actions)
        return
    rows = [
        (a.id, a.action, a.decided_step, a.applied_step, a.mode, a.status, a.readback, a.outcome, a.reason)
        for a in actions
    ]
    columns = ["id", "action", "decided", "applied", "mode", "status", "read back", "outcome", "reason"]
    print_table(f"Actions of {found.record.run}", columns, rows)


@app.command()
def approve(action_id: IdArgument, directory: DirOption = None) -> None:
    """Approve an action that waits."""
    _answer(action_id, "approve", directory)


@app.command()
def refuse(action_id: IdArgument, directory: DirOption = None) -> None:
    """Refuse an action that waits."""
    _answer(action_id, "refuse", directory)


def _answer(action_id: str, verdict: Literal["approve", "refuse"], directory: DirOption) -> None:
    for found in reversed(stores.runs(stores.folder(directory))):
        with stores.reading(found) as store:
            action = next((item for item in store.read(found.record.run, ActionRecord) if item.id == action_id), None)
        if action is None:
            continue
        if action.status != "waiting":
            raise not_found(f"{action_id} does not wait: it is {action.status}")
        approval = Approval(
            run=found.record.run, action_id=action_id, verdict=verdict, by=getpass.getuser(), time_unix=time.time()
        )
        try:
            with contextlib.closing(SqliteStore(found.path)) as store:
                store.approve(approval)
        except (sqlite3.Error, OSError) as error:
            raise not_found(f"{found.path} cannot be written: {error}") from error
        typer.echo(
            f"{action_id} ({action.action} of {found.record.run}): {'approved' if verdict == 'approve' else 'refused'}"
        )
        return
    raise not_found(f"no action {action_id!r} under {stores.folder(directory)}")
