"""From command-line arguments to the three trainings: checked and complete, with nothing started yet."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fp8watch.demo.config import Device, EngineName, RunSpec, TrainingConfig
from fp8watch.demo.model import Shape, layer_names
from fp8watch.demo.scenarios.base import Scenario
from fp8watch.demo.scenarios.catalogue import SCENARIOS
from fp8watch.errors import BadInput
from fp8watch.policy.load import parse, read

MIN_STEPS = 20
"""The mean of the last 20 steps is what the demo compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One demo: a watched run, its healthy twin, and the same run unwatched."""

    scenario: Scenario
    fault_step: int | None
    layer: str | None
    policy: str
    """Name of a shipped policy or path of a file."""
    watched: RunSpec
    twin: RunSpec
    unwatched: RunSpec

    @property
    def run(self) -> str:
        """Name of the watched run."""
        assert self.watched.run is not None
        return self.watched.run


def make_plan(
    *,
    scenario: str,
    policy: str = "auto",
    steps: int | None = None,
    seed: int = 0,
    fault_step: int | None = None,
    layer: str | None = None,
    device: Device = "cpu",
    engine: EngineName = "emulation",
) -> Plan:
    """The plan for these arguments. Raises `BadInput` with every problem."""
    problems = []
    chosen = SCENARIOS.get(scenario)
    if chosen is None:
        raise BadInput([f"command line:1: --scenario: {scenario!r} is none of {', '.join(SCENARIOS)}"])
    config = TrainingConfig(seed=seed, device=device, engine=engine)
    if steps is not None:
        config = msgspec.structs.replace(config, steps=steps)
    if config.steps < MIN_STEPS:
        problems.append(f"command line:1: --steps: {config.steps} is less than {MIN_STEPS}")
    both = msgspec.structs.replace(config, **chosen.both)
    faulty = msgspec.structs.replace(both, **chosen.faulty)
    at = _fault_step(chosen, faulty, fault_step)
    if at is not None and not 1 <= at <= config.steps:
        problems.append(f"command line:1: --fault-step: {at} is not a step from 1 to {config.steps}")
    if at == 1 and chosen.needs_scales and engine == "transformer_engine":
        problems.append("command line:1: --fault-step: 1: Transformer Engine has no scales before the first forward")
    names = layer_names(Shape(num_layers=config.num_layers, width=config.width))
    if layer is not None and not chosen.takes_layer:
        problems.append(f"command line:1: --layer: {scenario} has no layer")
    elif layer is not None and layer not in names:
        problems.append(f"command line:1: --layer: {layer!r} is none of {', '.join(names)}")
    try:
        parse(*read(policy))
    except BadInput as error:
        problems += error.problems
    if problems:
        raise BadInput(problems)
    layer = layer or chosen.layer
    if Path(policy).is_file():
        policy = str(Path(policy).resolve())
    run = f"demo-{scenario}-{seed}-{secrets.token_hex(3)}"
    unwatched = RunSpec(config=faulty, scenario=scenario, fault_step=at, layer=layer)
    return Plan(
        scenario=chosen,
        fault_step=at,
        layer=layer,
        policy=policy,
        watched=msgspec.structs.replace(unwatched, run=run, policy=policy),
        twin=RunSpec(config=both),
        unwatched=unwatched,
    )


def _fault_step(scenario: Scenario, config: TrainingConfig, wanted: int | None) -> int | None:
    """Step in which the fault begins, or what it means for a scenario that does not take one."""
    if scenario.takes_fault_step:
        return wanted if wanted is not None else max(1, round(config.steps * scenario.fault_share))
    return config.warmup_steps if scenario.faulty else None
