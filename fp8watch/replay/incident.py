"""One incident of a recorded run: what was found, considered and done, who approved it, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fp8watch import action_words, evidence_words
from fp8watch.controller.stores.base import Store
from fp8watch.records import ActionRecord, CommandResult, Finding, RunRecord, TraceEntry

_CONTEXT = frozenset({"policy", "attempt", "checkpoint"})
"""Events that belong to no incident. Those between an incident's first and last line are shown with it."""
_OF_ACTION = frozenset({"waiting", "ordered", "concluded", "undoing", "undone"})
"""Events of an action that belong to every incident for which it was asked about."""
_REASONS = {"for": "speaks for it", "against": "speaks against it"}
_SAID = {
    "found": frozenset({"detector", "cause"}),
    "passed_over": frozenset({"status"}),
    "concluded": frozenset({"verb", "command", "term"}),
    "undone": frozenset({"verb", "command", "term"}),
}
"""Event -> details that its line already shows, or that only programs need."""
_NOTHING: tuple[Any, ...] = ("", None, {}, [], 0)
MAX_SHOWN = 6
"""Most items of a list or mapping that a story shows; a bundle's JSON has all."""
MAX_RESULTS = 64
"""Most answers of ranks that a story shows one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Everything that a store holds about one incident."""

    name: str
    record: RunRecord
    findings: list[Finding]
    actions: list[ActionRecord]
    results: list[CommandResult]
    trace: list[TraceEntry]

    @property
    def first_step(self) -> int:
        """The earliest onset."""
        return min(finding.onset_step for finding in self.findings)

    @property
    def last_step(self) -> int:
        """The last step at which something was found, done or concluded."""
        steps = [finding.step for finding in self.findings]
        steps += [entry.step for entry in self.trace if entry.event not in _CONTEXT]
        steps += [a.settle_until for a in self.actions if a.settle_until is not None]
        return max(steps)

    def covers(self, attempt: int, step: int, margin: int) -> bool:
        """Whether a step is within `margin` steps of the incident, in an attempt that it concerns."""
        attempts = {finding.attempt for finding in self.findings} | {entry.attempt for entry in self.trace}
        is_near = self.first_step - margin <= step <= self.last_step + margin
        return is_near and min(attempts) <= attempt <= max(attempts)

    def story(self) -> Iterator[str]:
        """The whole incident in words, line by line."""
        record, hello = self.record, self.record.hello
        versions = ", ".join(f"{name} {value}" for name, value in sorted(hello.framework.items()))
        yield f"Incident {self.name} of run {record.run}"
        ranks = "1 rank" if hello.world_size == 1 else f"{hello.world_size} ranks"
        yield f"policy {hello.policy_name}; {ranks}; {versions or 'versions not known'}"
        for finding in self.findings:
            yield ""
            where = finding.tensor or ", ".join(finding.layers[:4]) or "the whole run"
            yield (
                f"{finding.id}: {finding.severity} {finding.detector} at step {finding.step} (attempt"
                f" {finding.attempt}), since step {finding.onset_step}, in {where}; cause: {finding.cause}"
            )
            if lead := evidence_words.not_finite(finding.evidence):
                yield f"    {lead}"
            for key, value in evidence_words.telling(finding.evidence).items():
                if key in _REASONS or value not in ("", None, {}, []):
                    yield f"    {_REASONS.get(key, key)}: {_reasons(value) if key in _REASONS else _shown(value)}"
        yield ""
        yield "Decisions"
        for entry in self.trace:
            yield f"  {_line(entry)}"
        if not self.trace:
            yield "  none recorded (the run was recorded before there was a decision log)"
        for action in self.actions:
            yield ""
            yield from self._of_action(action)

    def _of_action(self, action: ActionRecord) -> Iterator[str]:
        params = f" ({_shown(action.params)})" if action.params else ""
        read_back, effect = action_words.read_back(action), action_words.effect(action)
        parts = [action_words.state(action), read_back and f"read back {read_back}", effect]
        yield f"{action.id}: {action.action}{params}: {', '.join(part for part in parts if part)}"
        if action.reason:
            yield f"    {action.reason}"
        # A rank answers when it has applied a command and again after the read-back; the later answer has both.
        of_action = (item for item in self.results if item.id.partition("/")[0] == action.id)
        answers = list({(item.id, item.verb, item.rank): item for item in of_action}.values())
        for item in answers[:MAX_RESULTS]:
            read_back = f", read back {item.readback}" if item.status == "applied" else ""
            told = "; ".join(part for part in (item.detail, _shown(item.observed) if item.observed else "") if part)
            yield f"    rank {item.rank}, step {item.step}: {item.verb} {item.status}{read_back}{told and f'; {told}'}"
        if len(answers) > MAX_RESULTS:
            yield f"    and {len(answers) - MAX_RESULTS} more answers of ranks"


def find(store: Store, record: RunRecord, name: str) -> Incident | None:
    """The incident with this id, or the one of a finding or action with this id; None if the run has none."""
    run = record.run
    findings = list(store.read(run, Finding))
    actions = list(store.read(run, ActionRecord))
    incident = next((item.incident or item.id for item in findings if name in (item.incident, item.id)), None)
    incident = incident or next((item.incident for item in actions if item.id == name), None)
    here = [item for item in findings if (item.incident or item.id) == incident]
    if incident is None or not here:
        return None
    done = [item for item in actions if incident in item.incidents]
    ids = {item.id for item in done}
    shared = {item.id for item in done if item.incident != incident}
    trace = list(store.read(run, TraceEntry))
    own = [number for number, entry in enumerate(trace) if _is_of(entry, incident, shared)]
    if own:
        first = max((n for n in range(own[0]) if trace[n].event in {"policy", "attempt"}), default=own[0])
        span = range(own[0], own[-1] + 1)
        trace = [
            entry
            for number, entry in enumerate(trace)
            if _is_of(entry, incident, shared) or number == first or (number in span and entry.event in _CONTEXT)
        ]
    return Incident(
        name=incident, record=record, findings=here, actions=done,
        results=[item for item in store.read(run, CommandResult) if item.id.partition("/")[0] in ids],
        trace=trace if own else [],
    )  # fmt: skip


def _is_of(entry: TraceEntry, incident: str, shared: set[str]) -> bool:
    """Whether a line is about an incident: its own, or of an action that another one's question covers."""
    return entry.incident == incident or (entry.action_id in shared and entry.event in _OF_ACTION)


def _line(entry: TraceEntry) -> str:
    when = datetime.fromtimestamp(entry.time_unix, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    what = " ".join(part for part in (entry.action, entry.action_id and f"({entry.action_id})") if part)
    rule = f"rule {entry.rule}" if entry.rule else ""
    said = _SAID.get(entry.event, frozenset())
    details = {key: value for key, value in entry.details.items() if key not in said and value not in _NOTHING}
    if "sha256" in details:
        details["sha256"] = str(details["sha256"])[:12]
    parts = [what, rule, entry.reason, _shown(details, len(details)) if details else ""]
    told = "; ".join(part for part in parts if part)
    event = entry.event.replace("_", " ")
    if entry.event == "passed_over" and entry.details.get("status") == "refused":
        event = "not allowed"
    return f"{when} step {entry.step} (attempt {entry.attempt}) {event}: {told}"


def _reasons(value: Any) -> str:
    """Reasons for or against a cause."""
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value)) or "nothing"
    return _shown(value)


def _shown(value: Any, most: int = MAX_SHOWN) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        shown = ", ".join(f"{key} {_shown(item)}" for key, item in list(value.items())[:most])
        return (shown + (", ..." if len(value) > most else "")) or "{}"
    if isinstance(value, list | tuple):
        shown = ", ".join(_shown(item) for item in value[:most])
        return f"[{shown}{f', ... {len(value)} in all' if len(value) > most else ''}]"
    return str(value)
