"""The decision log of a run: what happened to each incident and action, and why, for a reader months later.

`RunPilot` writes it as it decides, from what it was told and nothing else (no clock, no random id), so that a replay of
the same messages writes the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from fp8watch.controller.commands import Conclusion
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import Decision
from fp8watch.policy.view import View
from fp8watch.records import ActionRecord, CheckpointRecord, Command, Finding, Hello, TraceEntry

_EVENTS = {
    "propose": "proposed", "wait": "waiting", "verdict": "outcome", "revert": "undoing", "note": "held_back",
    "record": "passed_over", "apply": "ordered", "join": "held_back",
}  # fmt: skip


class Trace:
    """Gathers lines; `taken` returns them. `clock` gives the time of the message that is being processed."""

    def __init__(self, run: str, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._lines: list[TraceEntry] = []
        self._incidents: dict[str, str] = {}
        """Action id -> its incident."""
        self.attempt = 0
        self.step = 0

    def taken(self) -> list[TraceEntry]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def began(self, hello: Hello, policy: Policy, why: str) -> None:
        """A process start, a restart or a rollback: from here on under this policy."""
        text = hello.policy or ""
        details = {
            "policy": hello.policy_name, "mode": policy.mode, "step": hello.step,
            "sha256": hashlib.sha256(text.encode()).hexdigest() if text else "", "versions": dict(hello.framework),
            "world_size": hello.world_size,
        }  # fmt: skip
        self.attempt, self.step = hello.attempt, hello.step
        self._add("policy" if not why else "attempt", reason=why, details=details)

    def found(self, finding: Finding) -> None:
        """A finding and its place; the evidence is in the finding itself."""
        where = finding.tensor or (f"rank {finding.rank}" if finding.rank is not None else "the whole run")
        reason = f"{finding.detector} ({finding.cause}) since step {finding.onset_step} in {where}"
        self._add(
            "found", incident=finding.incident, finding=finding.id, reason=reason,
            details={"severity": finding.severity, "detector": finding.detector, "cause": finding.cause},
        )  # fmt: skip

    def decided(self, decision: Decision, view: View) -> None:
        """One decision of a step."""
        trouble = decision.trouble
        incident = trouble.incident if trouble is not None else self._incidents.get(decision.action_id, "")
        if decision.kind != "join":
            self._incidents[decision.action_id] = incident
        details: dict[str, Any] = {}
        if decision.kind in {"apply", "propose", "wait"}:
            details = {"params": _plain(decision.params), "mode": decision.mode}
            if decision.considered:
                details["considered"] = decision.considered
        if decision.kind == "wait" and decision.expires_step is not None:
            details["expires_step"] = decision.expires_step
        if decision.kind == "record":
            details = {"status": decision.status}
        if decision.kind == "verdict":
            details = {"outcome": decision.outcome}
        event = "person" if decision.by or decision.status == "expired" else _EVENTS[decision.kind]
        if decision.by:
            details["by"] = decision.by
        self._add(
            event, incident=incident, finding=trouble.finding if trouble is not None else "", rule=decision.rule,
            action_id=decision.action_id, action=decision.action, reason=decision.reason, details=details,
        )  # fmt: skip
        if event == "person" and decision.kind == "apply":
            self._add(
                "ordered", incident=incident, rule=decision.rule, action_id=decision.action_id, action=decision.action,
                reason=decision.reason, details={"params": _plain(decision.params), "mode": decision.mode},
            )  # fmt: skip

    def concluded(self, action_id: str, conclusion: Conclusion) -> None:
        """The result of a command on all ranks, as read back."""
        command: Command = conclusion.command
        details = {
            "verb": command.verb, "command": command.id, "term": command.term, "result": conclusion.result,
            "readback": conclusion.readback, "applied_step": conclusion.step, "observed": _plain(conclusion.observed),
            "steps_replayed": conclusion.steps_replayed,
        }  # fmt: skip
        event = "concluded" if command.verb == "apply" else "undone"
        self._add(
            event, incident=self._incidents.get(action_id, ""), action_id=action_id, action=command.action,
            reason=conclusion.detail, details=details,
        )  # fmt: skip

    def read_back(self, record: ActionRecord) -> None:
        """A skipped update (which is not a command), read back from the next step."""
        self._add(
            "outcome", incident=record.incident, rule=record.rule, action_id=record.id, action=record.action,
            reason="read back from the step after it",
            details={"outcome": record.outcome, "readback": record.readback, "observed": _plain(record.observed)},
        )  # fmt: skip

    def expired(self, action_id: str, reason: str, incident: str | None = None) -> None:
        """An action no longer waits for a person. `incident`: one that shares the question; None: its own."""
        incident = self._incidents.get(action_id, "") if incident is None else incident
        self._add("person", incident=incident, action_id=action_id, reason=reason)

    def tainted(self, record: CheckpointRecord) -> None:
        """A checkpoint that no rollback may use."""
        self._add("checkpoint", reason=record.reason, details={"checkpoint": record.checkpoint, "step": record.step})

    def _add(self, event: str, **fields: Any) -> None:
        self._lines.append(
            TraceEntry(
                run=self._run, attempt=self.attempt, step=self.step, time_unix=self._clock(),
                event=event, **fields,  # type: ignore[arg-type]
            )
        )  # fmt: skip


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(values)
