"""Findings and actions as sentences that fit on one line."""

from __future__ import annotations

from typing import Any

from fp8watch import action_words, evidence_words
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
    name = action_words.named(action.action, action.params)
    if action.applied_step is None:
        reason = f": {action.reason}" if action.reason else ""
        return f"step {action.decided_step}: {name} {action_words.state(action)}{reason}"
    observed = action_words.parameters(action.observed)
    read_back = f"read back {action_words.read_back(action)}" + (f" ({observed})" if observed else "")
    return f"step {action.applied_step}: {name}, {read_back}, {action_words.effect(action)}"


def evidence(found: dict[str, Any]) -> str:
    """The reasons in words where there are any, else the numbers."""
    words = found.get("for")
    if isinstance(words, list) and words:
        return "; ".join(str(word) for word in words)
    lead = evidence_words.not_finite(found)
    return lead or action_words.parameters(evidence_words.telling(found))
