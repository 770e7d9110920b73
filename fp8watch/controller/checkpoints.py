"""The controller's ledger: which checkpoint is pending, candidate, good or tainted, and what changes a label.

pending -> candidate: the rank that saves says that all of it is durable. candidate -> good: `healthy_steps` passed.
Any -> tainted: it was saved at or after the onset of an act trouble, or lies on a timeline that a rollback left.
good -> candidate: an onset that was found later falls into its healthy steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fp8watch.policy.view import Trouble
from fp8watch.records import CheckpointLabel, CheckpointRecord


class Ledger:
    """Checkpoints of one run by id. Every method gives back the records whose label it changed."""

    def __init__(self, healthy_steps: int) -> None:
        self.healthy_steps = healthy_steps
        self._records: dict[str, CheckpointRecord] = {}
        self._unsettled: set[str] = set()
        """Pending and candidate: all that a step without trouble can change. A long run has thousands of good ones."""

    def records(self) -> tuple[CheckpointRecord, ...]:
        """All of them, in the order they became known."""
        return tuple(self._records.values())

    @property
    def has_unsettled(self) -> bool:
        """Whether a checkpoint may still change its label without trouble."""
        return bool(self._unsettled)

    def add(self, record: CheckpointRecord) -> CheckpointRecord:
        """Take in what a rank says it has saved; a verdict of ours on the same checkpoint stands."""
        known = self._records.get(record.checkpoint)
        is_judged = known is not None and (known.label != "pending" or record.label == "pending")
        if known is not None and is_judged and known.attempt >= record.attempt and record.label != "tainted":
            record = msgspec.structs.replace(record, label=known.label, reason=known.reason)
        self._keep(record)
        return record

    def passed(self, step: int, troubles: Iterable[Trouble]) -> list[CheckpointRecord]:
        """A step has passed: promote what has lived through enough of them, taint what lies after an onset."""
        serious = [item for item in troubles if item.severity == "act"]
        changed = []
        open_to_change = self.records() if serious else [self._records[name] for name in sorted(self._unsettled)]
        for record in open_to_change:
            if record.label == "tainted":
                continue
            after = [item for item in serious if record.step >= item.onset_step]
            within = [item for item in serious if record.step < item.onset_step <= record.step + self.healthy_steps]
            if after:
                # Bad data heals and leaves the parameters sound: such a checkpoint waits, and is not condemned.
                if all(item.cause == "data" for item in after):
                    continue
                first = min(after, key=lambda item: item.onset_step)
                reason = f"saved at or after the onset of {first.detector} at step {first.onset_step}"
                changed.append(self._label(record, "tainted", reason))
            elif within:
                if record.label == "good":
                    reason = f"{within[0].detector} began at step {within[0].onset_step}, within its healthy steps"
                    changed.append(self._label(record, "candidate", reason))
            elif record.label == "candidate" and step >= record.step + self.healthy_steps:
                changed.append(self._label(record, "good", f"{self.healthy_steps} healthy steps"))
        return changed

    def rolled_back(self, target_step: int, onset_step: int, attempt: int) -> list[CheckpointRecord]:
        """The run went back: what the left timeline saved after the target is of no use."""
        changed = []
        for record in self.records():
            if record.step > target_step and record.attempt < attempt and record.label != "tainted":
                reason = f"timeline left by the rollback to step {target_step} (onset {onset_step})"
                changed.append(self._label(record, "tainted", reason))
        return changed

    def _label(self, record: CheckpointRecord, label: CheckpointLabel, reason: str) -> CheckpointRecord:
        changed = msgspec.structs.replace(record, label=label, reason=reason)
        self._keep(changed)
        return changed

    def _keep(self, record: CheckpointRecord) -> None:
        self._records[record.checkpoint] = record
        if record.label in {"pending", "candidate"}:
            self._unsettled.add(record.checkpoint)
        else:
            self._unsettled.discard(record.checkpoint)
