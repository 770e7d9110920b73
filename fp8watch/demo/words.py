"""Findings and actions as sentences a person can read on one line."""

from __future__ import annotations

from typing import Any

from fp8watch.records import ActionRecord, Finding


def finding_line(finding: Finding) -> str:
    """What, where, since when, why."""
    where = finding.tensor or finding.layer
    place = f" in {where}" if where else ""
    others = len(finding.layers) - 1
    if others > 0:
        place += f" and {others} more layers"
    return (
        f"step {finding.step}: {finding.detector} ({finding.severity}){place}, since step {finding.onset_step}; "
        f"cause {finding.cause}: {evidence(finding.evidence)}"
    )


def action_line(action: ActionRecord) -> str:
    """What was done, whether it is in force, whether it helped."""
    name = f"{action.action} {parameters(action.params)}".strip()
    if action.applied_step is None:
        return f"step {action.decided_step}: {name}: {action.status}; {action.reason}"
    return (
        f"step {action.applied_step}: {name}; read back {action.readback} {parameters(action.observed)}; "
        f"outcome {action.outcome.replace('_', ' ')}"
    )


def evidence(found: dict[str, Any]) -> str:
    """The reasons as words where there are some, else the numbers."""
    words = found.get("for")
    if isinstance(words, list) and words:
        return "; ".join(str(word) for word in words)
    return parameters(found)


def parameters(values: dict[str, Any], limit: int = 4) -> str:
    """`name=value` of the plain ones, `name=3 entries` of the others."""
    parts = []
    for name, value in list(values.items())[:limit]:
        if isinstance(value, float):
            parts.append(f"{name}={value:.4g}")
        elif isinstance(value, list | dict):
            parts.append(f"{name}={_brief(value)}")
        elif value is not None:
            parts.append(f"{name}={value}")
    if len(values) > limit:
        parts.append("...")
    return " ".join(parts)


def _brief(value: list[Any] | dict[str, Any]) -> str:
    if len(value) == 1:
        return str(next(iter(value)))
    return f"{len(value)} entries"
