"""Command-line arguments become three trainings, or every mistake in them is reported and nothing starts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from fp8watch.demo.cli import demo
from fp8watch.demo.plan import make_plan
from fp8watch.demo.scenarios.catalogue import SCENARIOS
from fp8watch.errors import BadInput

CONTRACT = [
    "healthy", "frozen-scale", "gradient-underflow", "nan-loss", "lr-too-high", "short-warmup", "grad-bursts",
    "bad-batch", "bit-flip", "outlier-channel",
]  # fmt: skip

app = typer.Typer()
app.command()(demo)


def test_all_scenarios_are_there() -> None:
    assert sorted(SCENARIOS) == sorted(CONTRACT)


@pytest.mark.parametrize("name", CONTRACT)
def test_runs_of_a_plan_differ_in_the_fault_alone(name: str) -> None:
    plan = make_plan(scenario=name, seed=3)
    assert plan.unwatched == msgspec.structs.replace(plan.watched, run=None, policy=None)
    assert plan.twin.fault_step is None
    assert plan.twin.run is None
    faulty = dict(SCENARIOS[name].faulty)
    assert plan.watched.config == msgspec.structs.replace(plan.twin.config, **faulty)
    assert plan.twin.config.seed == 3


def test_fault_steps() -> None:
    assert make_plan(scenario="frozen-scale").fault_step == 200
    assert make_plan(scenario="frozen-scale", steps=100, fault_step=31).fault_step == 31
    assert make_plan(scenario="healthy", fault_step=31).fault_step is None
    short = make_plan(scenario="short-warmup", fault_step=31)
    assert short.fault_step == short.watched.config.warmup_steps < short.twin.config.warmup_steps


def test_names_of_runs_are_unique() -> None:
    assert make_plan(scenario="healthy").run != make_plan(scenario="healthy").run


def test_every_mistake_is_named(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nmode: autonomous\nrulez: []\n")
    with pytest.raises(BadInput) as raised:
        make_plan(scenario="nan-loss", steps=100, fault_step=101, layer="blocks.9.mlp.down", policy=str(policy))
    text = str(raised.value)
    for part in ("--fault-step: 101", "--layer: 'blocks.9.mlp.down'", "policy.yaml:2: mode", "policy.yaml:3: rulez"):
        assert part in text


def test_a_scenario_without_layer_refuses_one() -> None:
    with pytest.raises(BadInput, match="has no layer"):
        make_plan(scenario="lr-too-high", layer="blocks.0.mlp.down")


def test_bad_input_ends_with_2() -> None:
    result = CliRunner().invoke(app, ["--scenario", "frozen"])
    assert result.exit_code == 2
    assert "frozen-scale" in result.output


def test_list_names_every_scenario() -> None:
    result = CliRunner().invoke(app, ["--list", "--json"])
    assert result.exit_code == 0
    assert [row["scenario"] for row in json.loads(result.output)] == list(SCENARIOS)
