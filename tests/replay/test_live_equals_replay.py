"""The decision log of a live run and that of its replay from the store are equal to the byte."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import Counter
from pathlib import Path

import live_run
import msgspec
import pytest
from live_run import LiveRun

from fp8watch import wire
from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.policy.load import load, read
from fp8watch.records import ActionRecord, Arrival, Finding, StepFrame, TraceEntry
from fp8watch.replay.reenact import Reenactment, stored_trace
from fp8watch.replay.run import replay

POLICY = f"""{live_run.POLICY}  - name: loss
    when: {{detector: [loss_spike, divergence, update_rms], severity: act}}
    mode: approve
    ladder: [{{action: hold_lr, factor: 0.5, settle_steps: 5, hold_steps: 30}}]
"""


def numbers(step: int, run: LiveRun) -> dict[str, float]:
    if run.attempt == 0 and step == 95:
        run.is_broken = True
    if run.is_broken:
        return {"loss": math.nan, "grad_norm": math.nan, "param_nonfinite": 1.0}
    if run.attempt == 1 and step == 120:
        run.scale = {name: value * 64 for name, value in run.scale.items()}
    if run.attempt >= 2 and 280 <= step < 300 and step % 2 == 0:
        return {"grad_norm": 60.0}
    return {}


def record(path: Path) -> LiveRun:
    """A live run with everything in it that may go wrong with the order of things."""
    store = SqliteStore(path / "store.sqlite")
    run = LiveRun(store, POLICY, numbers, directory=path)
    run.drop = {(0, 60, 1), (1, 118, 0), (1, 118, 1), (2, 170, 0)}
    run.hello()
    run.train(130)  # breaks at 95, is rolled back, scales go wrong at 120 and are repaired
    run.evaluate()
    run.new_controller()  # the agent is killed and comes back
    run.hello()
    run.train(160)
    run.restart_training(150)  # training is killed and goes on from a checkpoint
    run.train(300)
    waiting, *_ = [item for item in store.read("r", ActionRecord) if item.status == "waiting"]
    store.approve(Approval(run="r", action_id=waiting.id, verdict="approve", by="mara", time_unix=1.0))
    run.controller.look()
    run.train(315)
    run.disarm(True)
    run.train(330)
    run.disarm(False)
    run.controller.lost("r", 1)
    run.ranks = 1
    run.train(400)
    run.end()
    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live")
    with contextlib.closing(record(path).store):
        return path / "store.sqlite"


def reenacted(path: Path) -> tuple[list[bytes], list[Finding]]:
    with contextlib.closing(SqliteStore(path, read_only=True)) as store:
        trace, findings = [], []
        for seen in Reenactment(store, "r").steps():
            trace += [wire.pack(entry) for entry in seen.trace]
            findings += seen.findings
        return trace, findings


def test_the_run_has_everything_in_it(recorded: Path) -> None:
    with contextlib.closing(SqliteStore(recorded, read_only=True)) as store:
        kinds = Counter(item.kind for item in store.read("r", Arrival))
        events = Counter(item.event for item in store.read("r", TraceEntry))
        done = Counter(item.action for item in store.read("r", ActionRecord) if item.readback == "ok")
    assert kinds["opened"] == 3, "two processes, and a start of training"
    assert {"hello", "layout", "checkpoint", "result", "evaluation", "goodbye", "lost", "disarmed", "approval"} <= set(
        kinds
    )
    assert {"policy", "attempt", "found", "waiting", "person", "ordered", "concluded", "outcome"} <= set(events)
    assert done["rollback"] == 1
    assert done["repair_scale"] >= 1
    assert done["tighten_clip"] == 1


def test_live_and_replayed_decision_logs_are_equal_to_the_byte(recorded: Path) -> None:
    with contextlib.closing(SqliteStore(recorded, read_only=True)) as store:
        live = [wire.pack(entry) for entry in stored_trace(store, "r")]
        found = list(store.read("r", Finding))
    trace, findings = reenacted(recorded)
    assert len(live) > 25
    assert trace == live
    assert findings == found


def test_what_was_not_told_in_order_is_found_out(recorded: Path, tmp_path: Path) -> None:
    """The comparison can fail: without a person's approval, or without a frame, the logs differ."""
    for left_out in ("approval", "frame"):
        path = tmp_path / f"{left_out}.sqlite"
        path.write_bytes(recorded.read_bytes())
        with contextlib.closing(SqliteStore(path)) as store:
            live = [wire.pack(entry) for entry in stored_trace(store, "r")]
            query = "DELETE FROM records WHERE kind = 'arrival' AND instr(body, CAST('approval' AS BLOB)) > 0"
            if left_out == "frame":
                query = "DELETE FROM frames WHERE attempt = 0 AND step = 95"
            assert store._db.execute(query).rowcount > 0
        assert reenacted(path)[0] != live


def test_replay_prints_the_log_and_what_the_runs_own_policy_did(recorded: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    assert replay([recorded], None, "jsonl", out=out, err=io.StringIO(), decisions=True) == 0
    with contextlib.closing(SqliteStore(recorded, read_only=True)) as store:
        expected = [msgspec.json.encode(entry).decode() for entry in store.read("r", TraceEntry)]
        actions = [a for a in store.read("r", ActionRecord) if a.status in {"applied", "reverted"}]
    assert out.getvalue().splitlines() == expected
    policy = tmp_path / "p.yaml"
    policy.write_text(POLICY)
    out = io.StringIO()
    assert replay([recorded], load(policy), "jsonl", out=out, err=io.StringIO()) == 0
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    cost = lines[-1]["summary"]
    assert cost["assumed"] == "nothing: as it was"
    assert cost["actions"] == len(actions)
    assert cost["rollbacks"] == 1
    assert cost["steps_replayed"] == max(a.steps_replayed for a in actions) > 0
    assert cost["tokens_replayed"] == cost["steps_replayed"] * 2 * 512


def test_another_policy_is_rehearsed_on_the_same_findings(recorded: Path) -> None:
    answers = {}
    for name in ("auto", "observe"):
        out = io.StringIO()
        assert replay([recorded], load(name), "jsonl", out=out, err=io.StringIO()) == 0
        answers[name] = [json.loads(line) for line in out.getvalue().splitlines()]
    found = [[x for x in lines if "detector" in x] for lines in answers.values()]
    assert found[0] == found[1]
    costs = {name: lines[-1]["summary"] for name, lines in answers.items()}
    assert costs["observe"]["actions"] == 0
    assert costs["auto"]["actions"] > 0
    assert costs["auto"]["checkpoints"] == "as recorded"


def test_a_frame_that_is_sent_twice_changes_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    run = LiveRun(store, read("observe")[0], lambda step, run: {}, ranks=1)
    run.hello()
    run.train(5)
    frames = list(store.read("r", StepFrame))
    run.controller.receive(msgspec.structs.replace(frames[2], arrival=0))
    assert [frame.arrival for frame in store.read("r", StepFrame)] == [frame.arrival for frame in frames]
    assert run.controller.ignored["repeated frame"] == 1
    store.close()
