"""A person's answer, from the command line into a running run: in time, too late, and by name."""

from __future__ import annotations

import contextlib
import getpass
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_run import LiveRun
from typer.testing import CliRunner, Result

from fp8watch.cli import build
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import ActionRecord, RunRecord, TraceEntry

APP = build()
POLICY = """version: 1
mode: auto
rules:
  - name: broken
    when: {detector: nonfinite, severity: act}
    mode: approve
    approval: {timeout_steps: 30, default: DEFAULT}
    ladder: [{action: hold_lr, factor: 0.5, settle_steps: 5}]
"""


def numbers(step: int, run: LiveRun) -> dict[str, float]:
    bad = step >= 80 and "hold_lr" not in run.in_force
    return {"loss": float("nan")} if bad else {}


class Desk:
    """A run that has just asked, and a person's terminal."""

    def __init__(self, folder: Path, default: str = "refuse") -> None:
        path = folder / "runs" / "r"
        path.mkdir(parents=True)
        self.folder = folder
        self.store = SqliteStore(path / "store.sqlite")
        self.run = LiveRun(self.store, POLICY.replace("DEFAULT", default), numbers, ranks=1, directory=folder)
        self.run.hello()
        self.run.train(83)

    def call(self, *arguments: str) -> Result:
        return CliRunner().invoke(APP, ["actions", *arguments, "--dir", str(self.folder)])

    def listed(self, *arguments: str) -> list[dict[str, Any]]:
        return list(json.loads(self.call("list", *arguments, "--json").stdout))

    def action(self, action_id: str) -> ActionRecord:
        return next(item for item in self.store.read("r", ActionRecord) if item.id == action_id)


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    made = Desk(tmp_path)
    with contextlib.closing(made.store):
        yield made


def test_an_approval_is_carried_out_and_has_a_name(desk: Desk) -> None:
    (waiting,) = desk.listed("--waiting")
    assert waiting["expires_step"] == waiting["decided_step"] + 30
    assert "waiting until step" in desk.call("list").stdout
    assert desk.call("approve", waiting["id"]).exit_code == 0
    desk.run.controller.look()
    desk.run.train(95)
    done = desk.action(waiting["id"])
    assert (done.status, done.readback, done.answered_by) == ("applied", "ok", getpass.getuser())
    assert desk.run.in_force["hold_lr"] == {"factor": 0.5}
    assert not desk.listed("--waiting")
    again = desk.call("approve", waiting["id"])
    assert again.exit_code == 3
    assert f"does not wait for anybody: done, approved by {getpass.getuser()}" in again.stderr
    person = [entry for entry in desk.store.read("r", TraceEntry) if entry.event == "person"]
    assert [entry.details["by"] for entry in person] == [getpass.getuser()]


def test_a_refusal_is_carried_out(desk: Desk) -> None:
    (waiting,) = desk.listed("--waiting")
    assert desk.call("refuse", waiting["id"]).exit_code == 0
    desk.run.controller.look()
    desk.run.train(130)
    assert desk.action(waiting["id"]).status == "refused"
    assert not desk.run.in_force
    assert desk.call("approve", waiting["id"]).exit_code == 3


def test_it_cannot_be_approved_after_its_moment(desk: Desk) -> None:
    (waiting,) = desk.listed("--waiting")
    desk.run.train(waiting["expires_step"] + 2)
    assert desk.action(waiting["id"]).status == "expired"
    late = desk.call("approve", waiting["id"])
    assert late.exit_code == 3
    assert "does not wait for anybody: expired, nobody answered" in late.stderr
    assert not desk.run.in_force


def test_an_answer_that_crosses_the_end_of_its_moment_does_nothing(desk: Desk) -> None:
    """Given before the command line could know, read by the controller after."""
    (waiting,) = desk.listed("--waiting")
    assert desk.call("approve", waiting["id"]).exit_code == 0
    desk.run.controller.look = lambda: None  # type: ignore[method-assign]
    desk.run.train(waiting["expires_step"] + 2)
    del desk.run.controller.look  # type: ignore[method-assign]
    desk.run.controller.look()
    desk.run.train(waiting["expires_step"] + 20)
    assert desk.action(waiting["id"]).status == "expired"
    assert not desk.run.in_force


def test_a_run_that_has_come_further_than_its_action_waits_takes_no_answer(desk: Desk) -> None:
    """The record of the action may lag behind that of the run."""
    (waiting,) = desk.listed("--waiting")
    record = next(iter(desk.store.runs()))
    desk.store.append("r", [msgspec.structs.replace(record, last_step=waiting["expires_step"] + 1)])
    late = desk.call("approve", waiting["id"])
    assert late.exit_code == 3
    assert "it waited until step" in late.stderr
    assert not desk.store.approvals("r")


@pytest.mark.parametrize("how", ["goodbye", "lost"])
def test_nothing_waits_in_a_run_that_has_ended(desk: Desk, how: str) -> None:
    (waiting,) = desk.listed("--waiting")
    desk.run.end() if how == "goodbye" else desk.run.controller.lost("r", 0)
    assert desk.action(waiting["id"]).status == "expired"
    assert "the run ended before anybody answered" in desk.action(waiting["id"]).reason
    record = next(iter(desk.store.runs()))
    assert isinstance(record, RunRecord)
    desk.store.append("r", [msgspec.structs.replace(desk.action(waiting["id"]), status="waiting")])
    late = desk.call("approve", waiting["id"])
    assert late.exit_code == 3
    assert f"the run is {record.state}" in late.stderr


def test_a_rollback_or_restart_takes_the_moment_away(desk: Desk) -> None:
    (waiting,) = desk.listed("--waiting")
    desk.run.restart_training(at=60)
    assert desk.action(waiting["id"]).status == "expired"
    assert desk.call("approve", waiting["id"]).exit_code == 3


def test_silence_may_mean_yes(tmp_path: Path) -> None:
    desk = Desk(tmp_path, default="apply")
    with contextlib.closing(desk.store):
        (waiting,) = desk.listed("--waiting")
        desk.run.train(waiting["expires_step"] + 10)
        done = desk.action(waiting["id"])
        assert (done.status, done.readback, done.answered_by) == ("applied", "ok", "the policy's default")
        assert "nobody answered in 30 steps" in done.reason
