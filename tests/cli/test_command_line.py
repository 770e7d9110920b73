"""The command line: exit codes, JSON, stores of real runs; and it starts without torch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fp8watch.cli import build
from fp8watch.controller import markers
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import BadInput
from fp8watch.records import ActionRecord, CheckpointRecord, Finding, Hello, RunRecord
from fp8watch.settings import from_environment
from fp8watch.transport import endpoint

APP = build()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(APP, list(arguments))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for number, run in enumerate(("first", "second")):
        hello = Hello(
            wire_version=1, run=run, attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=1.0,
            step=0, capabilities={"raise_margin": "the recipe has no margin"},
        )  # fmt: skip
        record = RunRecord(
            run=run, state="running", hello=hello, started_unix=float(number), updated_unix=2.0, last_step=7
        )
        finding = Finding(
            id="f1", run=run, attempt=0, step=5, onset_step=4, detector="scale_frozen", severity="act",
            cause="bookkeeping", tensor="a:input", layer="a", layers=["a"], incident="i1",
            evidence={"deviation_log2": 6.0},
        )  # fmt: skip
        actions = [
            ActionRecord(
                id=f"{run}-1.0001", run=run, attempt=0, action="repair_scale", params={"tensors": ["a:input"]},
                rule="x", finding="f1", incident="i1", mode="approve", status="waiting", decided_step=5,
                observed={"loss": float("nan")},
            )
        ]  # fmt: skip
        saved = CheckpointRecord(run=run, attempt=0, checkpoint="c1", step=3, path="/c1", label="good")
        with contextlib.closing(SqliteStore(tmp_path / "runs" / run / "store.sqlite")) as store:
            store.append(run, [record, finding, *actions, saved])
    return tmp_path


def test_help_names_every_command() -> None:
    text = call("--help").stdout
    for name in ("demo", "replay", "doctor", "metrics", "policy", "runs", "incident", "actions", "disarm", "agent"):
        assert f" {name} " in text


def test_runs_are_listed_shown_and_found(home: Path) -> None:
    listed = json.loads(call("runs", "list", "--dir", str(home), "--json").stdout)
    assert [(item["run"], item["state"], item["last_step"]) for item in listed] == [
        ("first", "running", 7), ("second", "running", 7),
    ]  # fmt: skip
    shown = json.loads(call("runs", "show", "first", "--dir", str(home), "--json").stdout)
    assert shown["record"]["run"] == "first"
    assert shown["checkpoints"][0]["label"] == "good"
    assert shown["actions"][0]["observed"] == {"loss": "nan"}, "NaN is no JSON"
    newest = call("runs", "show", "--dir", str(home))
    assert "raise_margin: the recipe has no margin" in newest.stdout
    missing = call("runs", "show", "third", "--dir", str(home))
    assert missing.exit_code == 3
    assert "known: first, second" in missing.stderr


def test_a_run_whose_process_died_is_not_shown_as_running(home: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for run, pid in (("first", gone.pid), ("second", os.getpid())):
        place = endpoint.Endpoint(
            run=run, pid=pid, host=socket.gethostname(), socket="", metrics_url="", store=""
        )  # fmt: skip
        endpoint.write(home, place)
    listed = json.loads(call("runs", "list", "--dir", str(home), "--json").stdout)
    assert [(item["run"], item["state"]) for item in listed] == [("first", "lost"), ("second", "running")]
    assert "gone" in listed[0]["reason"]


def test_incidents_and_their_evidence(home: Path) -> None:
    (listed,) = json.loads(call("incident", "list", "--run", "first", "--dir", str(home), "--json").stdout)
    assert json.loads(call("incident", "list", "first", "--dir", str(home), "--json").stdout) == [listed]
    assert listed["incident"] == "i1"
    assert listed["actions"] == ["first-1.0001"]
    shown = json.loads(call("incident", "show", "i1", "--run", "first", "--dir", str(home), "--json").stdout)
    assert shown["findings"][0]["evidence"] == {"deviation_log2": 6.0}
    assert "deviation_log2" in call("incident", "show", "i1", "--dir", str(home)).stdout
    assert call("incident", "show", "i9", "--dir", str(home)).exit_code == 3


@pytest.mark.parametrize("verdict", ["approve", "refuse"])
def test_an_action_that_waits_is_answered(home: Path, verdict: str) -> None:
    waiting = json.loads(call("actions", "list", "--waiting", "--dir", str(home), "--json").stdout)
    named = call("actions", "list", waiting[0]["run"], "--waiting", "--dir", str(home), "--json")
    assert json.loads(named.stdout) == waiting
    assert [item["id"] for item in waiting] == ["second-1.0001"]
    assert call("actions", verdict, "first-1.0001", "--dir", str(home)).exit_code == 0
    with contextlib.closing(SqliteStore(home / "runs" / "first" / "store.sqlite", read_only=True)) as store:
        assert [(item.action_id, item.verdict) for item in store.approvals("first")] == [("first-1.0001", verdict)]
    assert call("actions", verdict, "nothing", "--dir", str(home)).exit_code == 3


def test_disarm_and_release(home: Path) -> None:
    assert call("disarm", "first", "--dir", str(home)).exit_code == 0
    assert markers.why_disarmed(home, "first")
    assert not markers.why_disarmed(home, "second")
    assert call("disarm", "--all", "--dir", str(home)).exit_code == 0
    assert markers.why_disarmed(home, "second")
    assert call("disarm", "--all", "--undo", "--dir", str(home)).exit_code == 0
    assert not markers.why_disarmed(home, "second")
    assert call("runs", "release", "first", "--dir", str(home)).exit_code == 3
    markers.write_halted(home, "first", reason="x", step=3, time_unix=0.0)
    assert call("runs", "release", "first", "--dir", str(home)).exit_code == 0
    assert not markers.is_halted(home, "first")


def test_a_bad_policy_is_named_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nmode: autoo\nrules:\n  - {name: a, when: {detector: nope}}\n")
    result = call("policy", "check", str(path))
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [f"{path}:2", "mode"], [f"{path}:4", "rules[0].when.detector"],
    ]  # fmt: skip
    good = json.loads(call("policy", "check", "auto", "--json").stdout)
    assert good["mode"] == "auto"
    assert json.loads(call("policy", "schema").stdout)["title"] == "Policy"


def test_metrics_prints_the_whole_catalogue() -> None:
    from fp8watch.metrics import CATALOGUE

    printed = json.loads(call("metrics", "--json").stdout)
    assert [item["name"] for item in printed] == [metric.name for metric in CATALOGUE]
    table = call("metrics").stdout
    assert all(metric.name in table for metric in CATALOGUE)


def test_doctor_says_what_does_not_work(tmp_path: Path) -> None:
    result = call("doctor", "--no-with-torch", "--json", "--dir", str(tmp_path / "new"))
    checks = {item["name"]: item["result"] for item in json.loads(result.stdout)}
    assert result.exit_code == 0
    for name in ("transformer-engine", "torchao"):  # the FP8 layers that are found in a model
        assert checks[name] == ("absent" if importlib.util.find_spec(name.replace("-", "_")) is None else "ok")
    assert checks["FP8WATCH_DIR"] == checks["sqlite"] == "ok"
    (tmp_path / "file").write_text("")
    broken = call("doctor", "--no-with-torch", "--json", "--dir", str(tmp_path / "file"))
    assert broken.exit_code == 3
    assert {item["name"] for item in json.loads(broken.stdout) if item["result"] == "problem"} >= {"FP8WATCH_DIR"}


def test_a_file_that_is_no_store_is_said_and_left_out(home: Path) -> None:
    (home / "runs" / "third").mkdir()
    (home / "runs" / "third" / "store.sqlite").write_text("no database" * 100)
    result = call("runs", "list", "--json", "--dir", str(home))
    assert len(json.loads(result.stdout)) == 2
    assert "not readable as a store" in result.stderr


def test_one_damaged_record_does_not_hide_the_other_runs(home: Path) -> None:
    with contextlib.closing(sqlite3.connect(home / "runs" / "first" / "store.sqlite")) as database, database:
        database.execute("UPDATE records SET body = x'00ff' WHERE kind = 'run'")
    result = call("runs", "list", "--json", "--dir", str(home))
    assert [row["run"] for row in json.loads(result.stdout)] == ["second"]


def test_a_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8WATCH_METRICS_PORT", "99999")
    monkeypatch.setenv("FP8WATCH_LOG_LEVEL", "loud")
    monkeypatch.setenv("FP8WATCH_DIR", "")
    with pytest.raises(BadInput) as caught:
        from_environment()
    fields = [problem.split(": ")[1] for problem in caught.value.problems]
    assert fields == ["FP8WATCH_METRICS_PORT", "FP8WATCH_LOG_LEVEL"]
    monkeypatch.setenv("FP8WATCH_METRICS_PORT", "")
    monkeypatch.setenv("FP8WATCH_LOG_LEVEL", "debug")
    settings = from_environment()
    assert (settings.metrics_port, settings.log_level, settings.dir) == (9464, "DEBUG", Path(".fp8watch"))


def test_the_command_line_needs_neither_torch_nor_the_agents_libraries(home: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'redis', 'prometheus_client', 'streamlit'): sys.modules[name] = None\n"
        "from fp8watch.cli import main\n"
        f"sys.argv = ['fp8watch', 'runs', 'list', '--json', '--dir', {str(home)!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 2
