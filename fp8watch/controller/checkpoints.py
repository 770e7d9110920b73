"""The controller's ledger: which checkpoint is pending, candidate, good or tainted, and what changes a label.

pending -> candidate: the saving rank reports that all of it is durable. candidate -> good: `healthy_steps` have passed.
Any -> tainted: it was saved at or after the onset of an act trouble, or is on a timeline that a rollback has left.
good -> candidate: an onset found later lies within its healthy steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fp8watch.policy.view import Trouble
from fp8watch.records import CheckpointLabel, CheckpointRecord, LedgerUpdate


def verdict(run: str, record: CheckpointRecord, start: str) -> LedgerUpdate:
    """What the ranks of a start (`Hello.start`) are told of a checkpoint."""
    return LedgerUpdate(run=run, checkpoint=record.checkpoint, label=record.label, reason=record.reason, start=start)


class Ledger:
    """Checkpoints of one run by id. Every method returns the records whose label it changed."""

    def __init__(self, healthy_steps: int) -> None:
        self.healthy_steps = healthy_steps
        self._records: dict[str, CheckpointRecord] = {}
        self._unsettled: set[str] = set()
        """Ids of pending and candidate ones, which a step without trouble can change. A long run has thousands of good
        ones."""

    def records(self) -> tuple[CheckpointRecord, ...]:
        """All of them, in the order they became known."""
        return tuple(self._records.values())

    @property
    def has_unsettled(self) -> bool:
        """Whether a step without trouble may still change the label of a checkpoint."""
        return bool(self._unsettled)

    def has(self, record: CheckpointRecord) -> bool:
        """Whether it is known already, whole as it is; one that was saved under the same name at another time is not,
        nor is one that was pending."""
        known = self._records.get(record.checkpoint)
        return known is not None and known.time_unix == record.time_unix

    def add(self, record: CheckpointRecord) -> CheckpointRecord:
        """Add a checkpoint that a rank has saved; our own verdict on it stands."""
        known = self._records.get(record.checkpoint)
        is_judged = known is not None and (known.label != "pending" or record.label == "pending")
        if known is not None and is_judged and known.attempt >= record.attempt and record.label != "tainted":
            record = msgspec.structs.replace(record, label=known.label, reason=known.reason)
        self._keep(record)
        return record

    def passed(self, step: int, troubles: Iterable[Trouble]) -> list[CheckpointRecord]:
        """A step has passed: promote checkpoints with enough healthy steps, taint those saved after an onset."""
        serious = [item for item in troubles if item.severity == "act"]
        changed = []
        open_to_change = self.records() if serious else [self._records[name] for name in sorted(self._unsettled)]
        for record in open_to_change:
            if record.label == "tainted":
                continue
            after = [item for item in serious if record.step >= item.onset_step]
            within = [item for item in serious if record.step < item.onset_step <= record.step + self.healthy_steps]
            if after:
                # Bad data heals and leaves the parameters sound: such a checkpoint waits and is not tainted.
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
        """The run went back: taint what the abandoned timeline saved after the target."""
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
