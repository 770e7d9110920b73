"""Findings and actions as sentences that fit on one line."""

from __future__ import annotations

from typing import Any

from fp8watch import action_words
from fp8watch.records import ActionRecord, Finding


def finding_line(finding: Finding, *, with_evidence: bool = True) -> str:
    """What, why, since when and where; and on what evidence."""
    where = finding.tensor or finding.layer
    place = f" in {where}" if where else ""
    others = len(finding.layers) - 1
    if others > 0:
        place += f" and {others} more layers"
    told = (
        f"step {finding.step}: {finding.detector} ({finding.severity}), cause {finding.cause}, "
        f"since step {finding.onset_step}{place}"
    )
    return f"{told}: {evidence(finding.evidence)}" if with_evidence else told


def action_line(action: ActionRecord) -> str:
    """What was done, whether it is in force, and whether it helped."""
    shown = parameters(action.params)
    name = f"{action.action} ({shown})" if shown else action.action
    if action.applied_step is None:
        reason = f": {action.reason}" if action.reason else ""
        return f"step {action.decided_step}: {name} {action_words.state(action)}{reason}"
    observed = parameters(action.observed)
    read_back = f"read back {action_words.read_back(action)}" + (f" ({observed})" if observed else "")
    return f"step {action.applied_step}: {name}, {read_back}, {action_words.effect(action)}"


def evidence(found: dict[str, Any]) -> str:
    """The reasons in words where there are any, else the numbers."""
    words = found.get("for")
    if isinstance(words, list) and words:
        return "; ".join(str(word) for word in words)
    return parameters(found)


def parameters(values: dict[str, Any], limit: int = 4) -> str:
    """`name 3` for plain values, `3 names` for lists and mappings."""
    parts = []
    for name, value in list(values.items())[:limit]:
        if isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        elif isinstance(value, list | dict):
            parts.append(str(next(iter(value))) if len(value) == 1 else f"{len(value)} {name}")
        elif value is not None:
            parts.append(f"{name} {value}")
    if len(values) > limit:
        parts.append("...")
    return ", ".join(parts)
