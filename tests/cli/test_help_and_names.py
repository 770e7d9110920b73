"""What a newcomer types and reads: names of runs where paths go, help without noise, words that say what is meant."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fp8watch import action_words
from fp8watch.cli import build
from fp8watch.controller.service import RunController
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.demo.scenarios.catalogue import SCENARIOS
from fp8watch.records import ACTIONS, ActionRecord, CheckpointRecord, Hello, RunRecord, StepFrame

COMMANDS = (
    "demo", "doctor", "replay", "policy check", "policy compare", "runs list", "runs show", "runs release",
    "incident list", "incident show", "incident export", "actions list", "actions approve", "actions refuse", "disarm",
    "metrics", "controller", "agent", "console",
)  # fmt: skip


def call(*arguments: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "100", **env}).invoke(build(), list(arguments))


def rollback(**fields: Any) -> ActionRecord:
    given: dict[str, Any] = {
        "id": "r-1.0001", "run": "r", "attempt": 0, "action": "rollback", "rule": "x", "finding": "f1",
        "incident": "i1", "mode": "approve", "decided_step": 121, "expires_step": 521, "status": "waiting",
        "params": {"checkpoint": "c", "checkpoint_step": 100},
    }  # fmt: skip
    return ActionRecord(**(given | fields))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with one run of thirty steps, recorded by the controller."""
    path = tmp_path / "runs" / "mine" / "store.sqlite"
    with contextlib.closing(SqliteStore(path)) as store:
        controller = RunController(store, clock=lambda: 1.0)
        hello = Hello(
            wire_version=1, run="mine", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=1.0,
            step=0, policy="version: 1\nmode: observe\n", policy_name="p", capabilities=dict.fromkeys(ACTIONS, ""),
        )  # fmt: skip
        controller.receive(hello)
        for step in range(1, 31):
            loss = float("nan") if step == 20 else 2.0
            frame = StepFrame(
                run="mine", attempt=0, rank=0, step=step, layout_id=0, time_unix=1.0, scalars={"loss": loss}, columns={}
            )
            controller.receive(frame)
        controller.tick()
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_show_no_type_and_arguments_are_in_capitals(command: str) -> None:
    text = call(*command.split(), "--help").stdout
    assert "--help" in text
    assert "<bool>" not in text
    usage = text.partition("Usage:")[2].splitlines()[0]
    words = re.findall(r"[\[{]([^\]}]+)[\]}]", usage.replace("[OPTIONS]", ""))
    assert [word for word in words if word != word.upper()] == []


def test_what_is_assumed_is_chosen_in_the_same_way_everywhere() -> None:
    for command in (["replay"], ["policy", "compare"]):
        text = call(*command, "--help").stdout
        assert "<helped|nothing>" in text
        assert "PATH..." in text
        assert "RUN..." not in text
    refused = call("policy", "compare", "observe", "auto", "x", "--assume", "maybe")
    assert refused.exit_code == 2
    assert "maybe" in refused.stderr


def test_a_runs_name_is_as_good_as_its_path(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = call("replay", "mine", "--format", "jsonl", FP8WATCH_DIR=str(home))
    assert by_name.exit_code == 0, by_name.output
    (row,) = [json.loads(line) for line in by_name.stdout.splitlines()]
    assert (row["run"], row["step"], row["detector"]) == ("mine", 20, "nonfinite")
    compared = call("policy", "compare", "observe", "auto", "mine", "--json", FP8WATCH_DIR=str(home))
    assert compared.exit_code == 0, compared.output
    assert json.loads(compared.stdout)["runs"][0]["steps"] == 30
    missing = call("replay", "yours", FP8WATCH_DIR=str(home))
    assert missing.exit_code == 2
    assert "yours:1: path: no such file or folder, and no run of that name under" in missing.stderr
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine").write_text("step,loss\n" + "".join(f"{step},2.0\n" for step in range(1, 11)))
    monkeypatch.chdir(here)
    assert "10 steps of 1 run" in call("replay", "mine", FP8WATCH_DIR=str(home)).stdout, "a path comes first"


def test_a_comparison_explains_its_columns(home: Path) -> None:
    text = call("policy", "compare", "observe", "auto", "mine", FP8WATCH_DIR=str(home)).stdout
    assert "apart at: first step at which the two policies answer differently" in text


def test_what_is_not_a_number_is_said_first(home: Path) -> None:
    table = call("replay", "mine", FP8WATCH_DIR=str(home)).stdout
    assert "not finite: loss nan" in table
    assert "is_first_step" not in table
    assert "is_first_step" not in call("incident", "show", "i00001", "--dir", str(home)).stdout


def test_the_list_of_scenarios_leaves_room_for_what_goes_wrong() -> None:
    lines = call("demo", "--list", COLUMNS="80").stdout.splitlines()
    start, end = lines[0].index("what goes wrong"), lines[0].index("--layer")
    assert end - start >= 35
    assert max(map(len, lines)) <= 80
    for scenario in SCENARIOS.values():
        assert scenario.layer is None or not scenario.takes_layer or any(scenario.layer in line for line in lines)
    assert "family" in call("demo", "--list", COLUMNS="140").stdout


def test_removed_checkpoints_are_not_listed_as_if_they_were_there(tmp_path: Path) -> None:
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=1.0, step=0
    )  # fmt: skip
    record = RunRecord(run="r", state="running", hello=hello, started_unix=0.0, updated_unix=2.0, last_step=399)
    saved = [
        CheckpointRecord(run="r", attempt=0, checkpoint=f"c{step}", step=step, path=path, label="good")
        for step, path in ((50, ""), (100, "/c100"))
    ]
    with contextlib.closing(SqliteStore(tmp_path / "runs" / "r" / "store.sqlite")) as store:
        store.append("r", [record, *saved, rollback()])
    rows = [line.split("│") for line in call("runs", "show", "r", "--dir", str(tmp_path)).stdout.splitlines()]
    labels = {row[1].strip(): row[4].strip() for row in rows if len(row) == 7}
    assert labels["c50"] == "removed (was good)"
    assert labels["c100"] == "good"
    listed = call("actions", "list", "r", "--dir", str(tmp_path)).stdout
    assert "waiting until step 521 (299 steps would be lost now)" in listed


def test_a_question_says_what_a_rollback_costs_now_and_how_it_ended() -> None:
    assert action_words.state(rollback(), 399) == "waiting until step 521 (299 steps would be lost now)"
    assert action_words.state(rollback()) == "waiting until step 521"
    assert action_words.state(rollback(action="halt", params={}), 399) == "waiting until step 521"
    silence = rollback(status="expired", reason="newest good checkpoint; nobody answered in 400 steps")
    assert action_words.state(silence) == "expired, nobody answered"
    assert action_words.state(rollback(status="expired", reason="the incident ended")) == "question withdrawn"
    assert action_words.state(rollback(status="expired", answered_by="mara")) == "too late"
