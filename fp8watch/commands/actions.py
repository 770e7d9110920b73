"""`fp8watch actions list|approve|refuse`."""

from __future__ import annotations

import getpass
import os
import time
from typing import Annotated, Literal

import typer

from fp8watch import action_words
from fp8watch.commands import stores
from fp8watch.commands.output import not_found, print_json, print_table
from fp8watch.commands.stores import DirOption, JsonOption
from fp8watch.errors import BadInput
from fp8watch.records import ActionRecord, RunRecord
from fp8watch.security import KeyRing, approvals, load_ring
from fp8watch.settings import from_environment

app = typer.Typer(help="What was done or proposed, and what waits for a person.", no_args_is_help=True)
RunOption = Annotated[str | None, typer.Option("--run", help="Run; default: the newest.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="Run; default: the newest.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of an action that waits.")]


@app.command("list")
def list_actions(
    name: RunArgument = None,
    run: RunOption = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only what waits for a person.")] = False,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the actions of a run in the order they were decided."""
    found = stores.find(stores.folder(directory), run if name is None else name)
    with stores.reading(found) as store:
        actions = list(store.read(found.record.run, ActionRecord))
    if waiting:
        actions = [action for action in actions if action.status == "waiting"]
    if as_json:
        print_json(actions)
        return
    now = found.record.last_step if found.record.state == "running" else None
    rows = [
        (
            a.id, a.action, a.decided_step, a.applied_step, a.mode, action_words.state(a, now),
            action_words.read_back(a), action_words.effect(a), a.reason,
        )
        for a in actions
    ]  # fmt: skip
    columns = ["id", "action", "decided", "done at", "mode", "what became of it", "read back", "effect", "reason"]
    print_table(f"Actions of {found.record.run}", columns, rows)


@app.command()
def approve(action_id: IdArgument, directory: DirOption = None) -> None:
    """Approve an action that waits. Of a cluster's run (FP8WATCH_REDIS_URL) that needs FP8WATCH_APPROVAL_KEY[_FILE]."""
    _answer(action_id, "approve", directory)


@app.command()
def refuse(action_id: IdArgument, directory: DirOption = None) -> None:
    """Refuse an action that waits. Of a cluster's run (FP8WATCH_REDIS_URL) that needs FP8WATCH_APPROVAL_KEY[_FILE]."""
    _answer(action_id, "refuse", directory)


def _check_moment(record: RunRecord, action: ActionRecord) -> None:
    """Exit with 3 when it is too late to answer: the run decides at its step boundaries and does not wait."""
    if action.status != "waiting":
        why = f": {action.reason}" if action.reason else ""
        raise not_found(f"{action.id} does not wait for anybody: {action_words.state(action)}{why}")
    if record.state != "running":
        raise not_found(f"{action.id} does not wait any more: the run is {record.state}")
    if action.expires_step is not None and record.last_step > action.expires_step:
        reason = f"the run is at step {record.last_step}, and it waited until step {action.expires_step}"
        raise not_found(f"{action.id} does not wait any more: {reason}")


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return f"user {os.getuid()}"


def _ring(found: stores.Found) -> KeyRing | None:
    """The key to sign with. None: unsigned, which the controller of a file believes, and that of a cluster only when it
    has no key.

    Raises `BadInput` where the controller of a cluster would ignore an unsigned verdict.
    """
    settings = from_environment()
    ring = load_ring(settings, "approval")
    if ring is not None or not found.redis_url:
        return ring
    if not settings.allow_unsigned:
        problem = "not set (nor FP8WATCH_APPROVAL_KEY_FILE): the cluster's controller counts signed verdicts only"
        trusted = "where it runs with FP8WATCH_ALLOW_UNSIGNED=1 and has no such key, set that variable here too"
        raise BadInput([f"environment:1: FP8WATCH_APPROVAL_KEY: {problem}; {trusted}"])
    typer.echo(f"not signed: this does not count if the controller at {found.store} has an approval key", err=True)
    return None


def _answer(action_id: str, verdict: Literal["approve", "refuse"], directory: DirOption) -> None:
    for found in reversed(stores.runs(stores.folder(directory))):
        with stores.reading(found) as store:
            action = next((item for item in store.read(found.record.run, ActionRecord) if item.id == action_id), None)
        if action is None or action.run != found.record.run:  # the store's word alone does not choose the run
            continue
        _check_moment(found.record, action)
        ring = _ring(found)
        approval = approvals.give(action, verdict, by=_person(), time_unix=time.time(), ring=ring)
        try:
            with stores.writing(found) as store:
                store.approve(approval)
        except OSError as error:
            raise not_found(f"{found.store} cannot be written: {error}") from error
        done = "approved" if verdict == "approve" else "refused"
        if found.redis_url:
            # The controller's key cannot be known here; the listing shows what it made of the verdict.
            signed = "signed" if ring is not None else "unsigned"
            done += f", {signed}; `fp8watch actions list {found.record.run}` says what the controller made of it"
        typer.echo(f"{action_id} ({action.action} of {found.record.run}): {done}")
        return
    raise not_found(f"no action {action_id!r} {stores.looked(stores.folder(directory))}")
