"""What the page shows of a run, as plain data: without Streamlit, so every number can be tested without a page."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from fp8watch import action_words, evidence_words
from fp8watch.controller.stores.base import Store
from fp8watch.records import ActionRecord, Finding, RunRecord
from fp8watch_dashboards.timeline import StepPoint, Timeline, TimelineReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The numbers at the top of the page. None means unknown, which is not 0."""

    state: str
    step: int
    attempt: int
    loss: float | None
    """Last finite loss of the current attempt, or of the newest attempt that has one."""
    loss_step: int | None
    policy_name: str
    policy_mode: str
    armed: bool
    observed_modules: int
    expected_modules: int
    bf16_modules: int | None
    open_actions: str
    """What waits for a person, and what was only proposed, in words; empty: nothing."""
    last_frame_unix: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything that the page draws in one refresh."""

    record: RunRecord
    header: Header
    timeline: Timeline
    findings: list[Finding]
    actions: list[ActionRecord]


def read_view(store: Store, record: RunRecord, reader: TimelineReader) -> RunView:
    """Read one run: all findings and actions, which are few, and only those frames that are drawn."""
    run = record.run
    findings = list(store.read(run, Finding))
    actions = sorted(store.read(run, ActionRecord), key=lambda action: (action.attempt, action.decided_step))
    events = [step for finding in findings for step in (finding.onset_step, finding.step)]
    events += [step for action in actions for step in (action.decided_step, action.applied_step) if step is not None]
    timeline = reader.read(store, record.hello.attempt, events)
    return RunView(
        record=record,
        header=_header(record, timeline, actions),
        timeline=timeline,
        findings=findings,
        actions=actions,
    )


def policy_mode(text: str | None) -> str:
    """The mode in a run's policy text; `observe` if there is none, which is the schema's default."""
    if not text:
        return "observe"
    try:
        document = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return "unreadable"
    mode = document.get("mode", "observe") if isinstance(document, dict) else None
    return mode if isinstance(mode, str) else "unreadable"


def finding_rows(findings: list[Finding]) -> list[dict[str, Any]]:
    """The findings table, newest first."""
    return [
        {
            "step": finding.step,
            "onset": finding.onset_step,
            "severity": finding.severity,
            "detector": finding.detector,
            "cause": finding.cause,
            "tensor or layer": finding.tensor or finding.layer or "",
            "more layers": max(0, len(finding.layers) - 1),
            "rank": finding.rank,
            "evidence": finding_text(finding.evidence),
            "incident": finding.incident,
            "attempt": finding.attempt,
        }
        for finding in reversed(findings)
    ]


def action_rows(actions: list[ActionRecord], now: int | None = None) -> list[dict[str, Any]]:
    """The action log, newest first, worded as in `fp8watch actions list`. `now`: step of a run that goes on."""
    return [
        {
            "decided": action.decided_step,
            "done at": "-" if action.applied_step is None else str(action.applied_step),
            "action": action.action,
            "rule": action.rule,
            "what became of it": action_words.state(action, now),
            "read back": action_words.read_back(action) or "-",
            "effect": action_words.effect(action) or "-",
            "params": evidence_text(action.params),
            "observed": evidence_text(action.observed),
            "reason": action.reason,
            "replayed": action.steps_replayed,
            "attempt": action.attempt,
            "id": action.id,
        }
        for action in reversed(actions)
    ]


def finding_text(evidence: dict[str, Any]) -> str:
    """The evidence of a finding: what is not finite first."""
    lead = evidence_words.not_finite(evidence)
    return ", ".join(part for part in (lead, evidence_text(evidence_words.telling(evidence))) if part)


def evidence_text(evidence: dict[str, Any]) -> str:
    """`name value` pairs on one line, floats with four digits."""
    return ", ".join(f"{name} {_short(value)}" for name, value in evidence.items())


def duration_text(seconds: float) -> str:
    """`12 s`, `7 min`, `5 h` or `3 days`. Negative durations, from a clock that is behind, count as 0 s."""
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{max(0, round(seconds / divisor))} {unit}"
    return f"{round(seconds / 86_400)} days"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple) and len(value) > 3:
        return f"[{', '.join(_short(item) for item in value[:3])}, ... {len(value)} in all]"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _header(record: RunRecord, timeline: Timeline, actions: list[ActionRecord]) -> Header:
    newest = timeline.points[-1] if timeline.points else None
    finite = _last_finite(timeline.points)
    bf16 = newest.scalars.get("bf16_modules") if newest else None
    return Header(
        state=record.state,
        step=newest.step if newest else record.last_step,
        attempt=newest.attempt if newest else record.hello.attempt,
        loss=finite.loss if finite else None,
        loss_step=finite.step if finite else None,
        policy_name=record.hello.policy_name,
        policy_mode=policy_mode(record.hello.policy),
        armed=record.hello.armed,
        observed_modules=record.hello.observed_modules,
        expected_modules=record.hello.expected_modules,
        bf16_modules=None if bf16 is None else int(bf16),
        open_actions=open_actions_text(actions, record),
        last_frame_unix=newest.time_unix if newest else None,
    )


def open_actions_text(actions: list[ActionRecord], record: RunRecord) -> str:
    """How many actions wait for a person, with the command that answers, and how many are proposals only."""
    waiting = [action for action in actions if action.status == "waiting"]
    proposed = sum(1 for action in actions if action.status == "proposed")
    parts = []
    if len(waiting) == 1 and record.state == "running":
        parts.append(f"1 action waits for a person (`fp8watch actions approve {waiting[0].id}`)")
    elif waiting and record.state == "running":
        parts.append(
            f"{len(waiting)} actions wait for a person (`fp8watch actions list {record.run} --waiting` names them)"
        )
    elif waiting:
        parts.append(f"{len(waiting)} not answered before the run's end")
    if proposed:
        parts.append(f"{proposed} only proposed")
    return "; ".join(parts)


def _last_finite(points: list[StepPoint]) -> StepPoint | None:
    return next((p for p in reversed(points) if p.loss is not None and math.isfinite(p.loss)), None)
