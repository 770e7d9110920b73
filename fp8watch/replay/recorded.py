"""What a recorded run's own policy did, from the decision log that its replay writes; nothing is assumed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fp8watch.errors import BadInput
from fp8watch.policy.load import parse
from fp8watch.policy.schema import Policy
from fp8watch.records import TraceEntry
from fp8watch.replay.recording import Recording, Seen

_KINDS = {
    "ordered": "apply", "proposed": "propose", "waiting": "wait", "passed_over": "unavailable", "undoing": "undo",
    "person": "answer",
}  # fmt: skip


def is_under(recording: Recording, policy: Policy) -> bool:
    """Whether the run was recorded under this same policy, with everything that a replay of its decisions needs."""
    if recording.steps is None or recording.facts.policy is None:
        return False
    try:
        return parse(recording.facts.policy) == policy
    except BadInput:
        return False


class Recorded:
    """Follows one run, with the interface of a `Rehearsal`."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._applied: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._steps_replayed = 0
        self._tokens_replayed: float | None = 0.0
        self._tokens = 0.0
        self._halted_step: int | None = None

    def observe(self, seen: Seen) -> list[dict[str, Any]]:
        """Rows to print for what was done in this step."""
        self._tokens = seen.sample.scalars.get("tokens", self._tokens)
        return [row for entry in seen.trace if (row := self._row(entry)) is not None]

    def cost(self) -> dict[str, Any]:
        """Costs so far, with the keys of `Rehearsal.cost`."""
        return {
            "assumed": "nothing: as it was",
            "checkpoints": "as recorded",
            "applied": dict(sorted(self._applied.items())),
            "actions": sum(self._applied.values()),
            "rollbacks": self._applied["rollback"],
            "steps_replayed": self._steps_replayed,
            "tokens_replayed": self._tokens_replayed,
            "steps_in_force": {},
            "proposed": self._answers["propose"],
            "asked": self._answers["wait"],
            "unavailable": self._answers["unavailable"],
            "refused": self._answers["refused"],
            "expired": self._answers["expired"],
            "undone": self._answers["undo"],
            "halted_step": self._halted_step,
        }

    def _row(self, entry: TraceEntry) -> dict[str, Any] | None:
        if entry.event == "concluded" and entry.details.get("result") == "applied":
            self._applied[entry.action] += 1
            replayed = int(entry.details.get("steps_replayed", 0))
            self._steps_replayed += replayed
            if replayed:
                known = self._tokens_replayed is not None and self._tokens > 0
                self._tokens_replayed = (self._tokens_replayed or 0.0) + replayed * self._tokens if known else None
        kind = _KINDS.get(entry.event)
        if kind is None:
            return None
        kind = str(entry.details.get("status", kind)) if entry.event in {"passed_over", "person"} else kind
        if kind in {"answer", "None"}:
            return None
        self._answers[kind] += 1
        if entry.action == "skip_update" and kind == "apply":
            self._applied["skip_update"] += 1
        if entry.action == "halt" and kind == "apply":
            self._halted_step = entry.step
        return {
            "action": entry.action,
            "step": entry.step,
            "severity": "recorded",
            "run": self._run,
            "kind": kind,
            "mode": entry.details.get("mode"),
            "params": entry.details.get("params", {}),
            "rule": entry.rule,
            "finding": entry.finding or None,
            "reason": entry.reason,
        }
