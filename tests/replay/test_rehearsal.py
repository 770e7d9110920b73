"""Rehearsals: what a policy would have done on a recorded run, at what cost, and two of them side by side."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.policy.load import parse
from fp8watch.replay.compare import compare
from fp8watch.replay.run import Assumptions, replay

RNG = np.random.default_rng(0)
LOSS = 3.0 * (1 + 0.01 * RNG.standard_normal(400))
LOSS[150:170] *= 2
LOSS[250:] *= 1.5
LOSS[350] = math.nan
POLICY = """version: 1
mode: MODE
budgets: {actions_per_1000_steps: 10}
rules:
  - name: spikes
    when: {detector: [loss_spike, divergence], severity: act}
    ladder:
      - {action: rollback, settle_steps: 10}
      - {action: hold_lr, settle_steps: 10}
  - name: broken
    when: {detector: nonfinite, severity: act}
    ladder: [{action: halt}]
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n" + "".join(f"{i + 1},{x}\n" for i, x in enumerate(LOSS)))
    return path


def rehearsed(log: Path, mode: str = "auto", **assumptions: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    out = io.StringIO()
    policy = parse(POLICY.replace("MODE", mode))
    assert replay([log], policy, out=out, err=io.StringIO(), assumptions=Assumptions(**assumptions)) == 0
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert {row.pop("path") for row in rows} == {str(log)}
    return [row for row in rows if "action" in row], rows[-1]["summary"]


def test_a_log_that_does_not_say_when_it_saved_has_nothing_to_go_back_to(log: Path) -> None:
    actions, cost = rehearsed(log)
    assert [(x["action"], x["kind"]) for x in actions[:2]] == [("rollback", "unavailable"), ("hold_lr", "apply")]
    assert "nothing to roll back to" in actions[0]["reason"]
    assert cost["checkpoints"] == "none"
    assert cost["rollbacks"] == cost["steps_replayed"] == 0


def test_with_assumed_checkpoints_a_rollback_has_its_price(log: Path) -> None:
    actions, cost = rehearsed(log, checkpoint_every=20)
    first = next(x for x in actions if x["action"] == "rollback" and x["kind"] == "apply")
    assert first["params"]["checkpoint_step"] == 140
    assert cost["steps_replayed"] == sum(
        x["step"] - x["params"]["checkpoint_step"]
        for x in actions
        if x["action"] == "rollback" and x["kind"] == "apply"
    )
    assert cost["checkpoints"] == "assumed every 20 steps"
    assert cost["tokens_replayed"] is None, "the log does not say"
    assert cost["halted_step"] == 351
    assert all(x["step"] <= 351 for x in actions), "nothing after the halt"


def test_tokens_are_counted_where_the_recording_has_them(tmp_path: Path) -> None:
    from fp8watch.detect.base import Sample
    from fp8watch.replay.detected import detected
    from fp8watch.replay.recording import Recording
    from fp8watch.replay.rehearsal import Rehearsal

    samples = (
        Sample(attempt=0, step=i + 1, scalars={"loss": float(x), "tokens": 1000.0}) for i, x in enumerate(LOSS[:200])
    )
    rehearsal = Rehearsal("r", parse(POLICY.replace("MODE", "auto")), checkpoint_every=20)
    for seen in detected(Recording(run="r", source="test", samples=samples)):
        rehearsal.observe(seen)
    cost = rehearsal.cost()
    assert cost["steps_replayed"] > 0
    assert cost["tokens_replayed"] == 1000.0 * cost["steps_replayed"]


def test_what_is_assumed_of_remedies_bounds_what_would_have_been_done(log: Path) -> None:
    _, least = rehearsed(log, checkpoint_every=20)
    _, most = rehearsed(log, checkpoint_every=20, outcome="nothing")
    assert "works at once" in least["assumed"]
    assert "does nothing" in most["assumed"]
    assert most["actions"] > least["actions"]


def test_a_policy_that_observes_or_asks_does_nothing(log: Path) -> None:
    _, observed = rehearsed(log, "observe", checkpoint_every=20)
    assert observed["actions"] == 0
    assert observed["proposed"] > 0
    _, asked = rehearsed(log, "approve", checkpoint_every=20)
    assert asked["actions"] == 0
    assert asked["asked"] > 0


def test_two_policies_side_by_side(log: Path, tmp_path: Path) -> None:
    one = parse(POLICY.replace("MODE", "auto"))
    two = parse(POLICY.replace("MODE", "auto").replace("      - {action: rollback, settle_steps: 10}\n", ""))
    (run,), problems = compare({"one": one, "two": two}, [log], Assumptions(checkpoint_every=20))
    assert not problems
    assert run.findings["act"] >= 3
    assert run.costs["one"]["rollbacks"] > 0
    assert run.costs["two"]["rollbacks"] == 0
    first = min(x["step"] for x in run.answers["one"])
    assert run.apart_at == first
    (same,), _ = compare({"a": one, "b": one.model_copy()}, [log], Assumptions(checkpoint_every=20))
    assert same.apart_at is None
    assert same.answers["a"] == same.answers["b"]


def test_the_comparison_is_what_each_rehearsal_alone_says(log: Path) -> None:
    one, two = parse(POLICY.replace("MODE", "auto")), parse(POLICY.replace("MODE", "approve"))
    assumptions = Assumptions(checkpoint_every=20)
    (run,), _ = compare({"one": one, "two": two}, [log], assumptions)
    for name, mode in (("one", "auto"), ("two", "approve")):
        actions, cost = rehearsed(log, mode, checkpoint_every=20)
        assert json.loads(json.dumps(run.answers[name])) == actions
        assert json.loads(json.dumps(run.costs[name])) == cost


def test_the_commands(log: Path, tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text(POLICY.replace("MODE", "auto"))
    app, bad = build(), tmp_path / "bad.csv"
    bad.write_text(log.read_text() + "x,1\n")
    call = ["policy", "compare", str(policy), "conservative", str(log), "--checkpoint-every", "20"]
    result = CliRunner().invoke(app, [*call, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["policies"] == [str(policy), "conservative"]
    assert document["totals"][str(policy)]["rollbacks"] == document["runs"][0]["costs"][str(policy)]["rollbacks"] > 0
    table = CliRunner().invoke(app, call)
    assert "conservative" in table.stdout
    assert CliRunner().invoke(app, [*call, "--assume", "luck"]).exit_code == 2
    partly = CliRunner().invoke(app, ["policy", "compare", "auto", "observe", str(bad), "--json"])
    assert partly.exit_code == 2
    assert json.loads(partly.stdout)["runs"][0]["steps"] == len(LOSS)
    assert f"{bad}:402: step: 'x' is not a number" in partly.stderr
    shown = CliRunner().invoke(app, ["replay", str(log), "--policy", str(policy), "--checkpoint-every", "20"])
    assert shown.exit_code == 0
    assert "rollback" in shown.stdout
    assert CliRunner().invoke(app, ["replay", str(log), "--decisions"]).exit_code == 2
