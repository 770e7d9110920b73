"""The demo as a person runs it: real processes, a real store, and a result that only the watch produces."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from fp8watch import wire
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.demo.cli import demo
from fp8watch.demo.plan import make_plan
from fp8watch.demo.processes import TrainingProcess
from fp8watch.demo.runner import Progress, TrainingFailed, run_plan
from fp8watch.records import Finding
from fp8watch.replay.reenact import Reenactment, stored_trace
from fp8watch.transport import endpoint

app = typer.Typer()
app.command()(demo)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_frozen_scale_is_found_and_repaired() -> None:
    arguments = ["--scenario", "frozen-scale", "--steps", "44", "--fault-step", "28", "--seed", "11", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    first = next(f for f in found["findings"] if f["severity"] == "act")
    assert (first["detector"], first["cause"], first["onset_step"]) == ("scale_frozen", "bookkeeping", 28)
    assert first["step"] <= 32
    action = found["actions"][0]
    assert (action["action"], action["readback"]) == ("repair_scale", "ok")
    assert 28 < action["applied_step"] <= 34
    assert found["final_loss"] is not None
    assert found["twin_final_loss"] is not None
    assert found["unwatched_final_loss"] is None
    assert (found["scenario"], found["seed"], found["steps"], found["fault_step"]) == ("frozen-scale", 11, 44, 28)
    # What the object says is what the store says, and the run has ended.
    place = endpoint.read(Path(os.environ["FP8WATCH_DIR"]), found["run"])
    assert place is not None
    assert place.state == "ended"
    deadline = time.monotonic() + 10
    while is_alive(place.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(place.pid)
    store = SqliteStore(found["store"], read_only=True)
    assert len(list(store.read(found["run"], Finding))) == len(found["findings"])
    # A replay from the store decides the same, to the byte.
    live = [wire.pack(entry) for entry in stored_trace(store, found["run"])]
    again = [wire.pack(entry) for seen in Reenactment(store, found["run"]).steps() for entry in seen.trace]
    assert len(live) >= 4
    assert again == live
    store.close()


def test_a_healthy_run_is_that_of_its_twin_to_the_bit() -> None:
    plan = make_plan(scenario="healthy", steps=24, seed=12)
    seen: list[Progress] = []
    progress = run_plan(plan, with_unwatched=False, listener=seen.append)
    assert progress.ended == "completed"
    assert [step for step, _ in progress.watched.series()] == list(range(1, 25))
    assert progress.watched.series() == progress.twin.series()
    assert progress.story.actions == []
    assert seen[-1] is progress


def test_a_training_that_breaks_is_reported_with_its_words() -> None:
    plan = make_plan(scenario="healthy", steps=20)
    broken = msgspec.structs.replace(plan.watched, config=msgspec.structs.replace(plan.watched.config, width=-1))
    with pytest.raises(TrainingFailed, match=r"(?s)watched ended with exit code 1.*Error"):
        run_plan(dataclasses.replace(plan, watched=broken), with_unwatched=False)


def test_a_stopped_training_is_gone(tmp_path: Path) -> None:
    process = TrainingProcess(make_plan(scenario="healthy", steps=400).twin, tmp_path / "log")
    assert process.poll() is None
    process.stop()
    assert not is_alive(process.pid)
