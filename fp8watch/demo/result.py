"""The JSON object at the end of `fp8watch demo --json`."""

from __future__ import annotations

import math
from typing import Any

from fp8watch.demo.plan import Plan
from fp8watch.demo.processes import Losses
from fp8watch.demo.story import Story
from fp8watch.records import ActionRecord, Finding


def as_json(
    plan: Plan, story: Story, *, watched: Losses, twin: Losses, unwatched: Losses | None, ended: str
) -> dict[str, Any]:
    """Plain values only. A number that is not finite becomes null in losses, and text (`nan`, `inf`) elsewhere.

    `ended`: how the watched run ended, `completed` or `halted`.
    """
    steps = plan.watched.config.steps
    return {
        "scenario": plan.scenario.name,
        "seed": plan.watched.config.seed,
        "steps": steps,
        "fault_step": plan.fault_step,
        "layer": plan.layer,
        "policy": plan.policy,
        "run": plan.run,
        "engine": plan.watched.config.engine,
        "ended": ended,
        "final_loss": watched.final(steps),
        "twin_final_loss": twin.final(steps),
        "unwatched_final_loss": None if unwatched is None else unwatched.final(steps),
        "steps_replayed": watched.num_replayed,
        "findings": [_finding(finding) for finding in story.findings],
        "actions": [_applied(action) for action in story.applied],
        "proposed": [_proposed(action) for action in story.proposed],
        "store": None if story.store is None else str(story.store),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    names = ("run", "step", "onset_step", "detector", "severity", "cause", "tensor", "layer", "rank", "evidence")
    return {name: _plain(getattr(finding, name)) for name in (*names, "incident")}


def _applied(action: ActionRecord) -> dict[str, Any]:
    names = ("id", "action", "params", "decided_step", "applied_step", "reason", "readback", "outcome")
    return {name: _plain(getattr(action, name)) for name in (*names, "observed", "rule", "incident")}


def _proposed(action: ActionRecord) -> dict[str, Any]:
    names = ("id", "action", "params", "decided_step", "reason", "status", "mode", "rule", "incident")
    return {name: _plain(getattr(action, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
