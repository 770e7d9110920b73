"""The controller's ledger: which checkpoint is pending, candidate, good or tainted, and what changes a label.

pending -> candidate: the saving rank reports that all of it is durable. candidate -> good: `healthy_steps` have passed.
Any -> tainted: it was saved at or after the onset of an act trouble, or is on a timeline that a rollback has left.
good -> candidate: an onset found later lies before it or within its healthy steps.

A candidate that was saved inside an act incident, up to the step at which that is known to be over, or has an onset
within its healthy steps, never becomes good: `incident_onset` says so, also to later processes. Warnings do not count.
One that lies where an incident was seen before a rollback or restart waits until that has been passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fp8watch.controller.episodes import Episode, Episodes, Why, remembered
from fp8watch.policy.view import Trouble
from fp8watch.records import CheckpointLabel, CheckpointRecord, Hello, LedgerUpdate, Stored


def verdict(run: str, record: CheckpointRecord, start: str) -> LedgerUpdate:
    """What the ranks of a start (`Hello.start`) are told of a checkpoint."""
    return LedgerUpdate(run=run, checkpoint=record.checkpoint, label=record.label, reason=record.reason, start=start)


class Ledger:
    """Checkpoints of one run by id. Every method returns the records whose label it changed."""

    def __init__(self, healthy_steps: int) -> None:
        self.healthy_steps = healthy_steps
        self._records: dict[str, CheckpointRecord] = {}
        self._unsettled: set[str] = set()
        """Ids of pending and candidate ones, which a step without trouble can change. A long run has thousands of
        others."""
        self._episodes = Episodes()

    def records(self) -> tuple[CheckpointRecord, ...]:
        """All of them, in the order they became known."""
        return tuple(self._records.values())

    @property
    def has_unsettled(self) -> bool:
        """Whether a step without trouble may still change what is known of a checkpoint."""
        return bool(self._unsettled) or self._episodes.has_current

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
            record = msgspec.structs.replace(
                record, label=known.label, reason=known.reason, incident_onset=known.incident_onset
            )
        self._keep(record)
        return record

    def remember(
        self, restored: Sequence[Stored], hello: Hello, *, step: int, seen: int, is_same_process: bool
    ) -> None:
        """Take over what the store knows, for a run that goes on at `step` (`episodes.remembered`). `seen`: steps that
        its detectors know of."""
        for record in restored:
            if isinstance(record, CheckpointRecord):
                self.add(record)
        step = max(step, hello.step)
        self._episodes.add(
            remembered(
                restored, step=step, attempt=hello.attempt, is_same_process=is_same_process, has_detectors=seen > 0
            )
        )
        if not is_same_process:
            self._goes_on_from(step)

    def keep_newest(self, number: int) -> None:
        """Forget all checkpoints but the newest."""
        kept = self.records()[-number:]
        self._records.clear()
        self._unsettled.clear()
        for record in kept:
            self._keep(record)

    def passed(
        self, step: int, troubles: Iterable[Trouble], why: Why = lambda incident: None
    ) -> list[CheckpointRecord]:
        """A step has passed: promote checkpoints with enough healthy steps, taint those saved after an onset.

        `why`: what speaks against an incident's being over that the detectors have closed.
        """
        serious = [item for item in troubles if item.severity == "act"]
        self._episodes.passed(step, serious, why)
        changed = []
        open_to_change = self.records() if serious else [self._records[name] for name in sorted(self._unsettled)]
        for record in open_to_change:
            if record.label == "tainted":
                continue
            after = [item for item in serious if record.step >= item.onset_step]
            # Bad data heals and leaves the parameters sound: a checkpoint saved in it is not tainted.
            if after and any(item.cause != "data" for item in after):
                first = min(after, key=lambda item: item.onset_step)
                reason = f"saved at or after the onset of {first.detector} at step {first.onset_step}"
                changed.append(self._label(record, "tainted", reason))
            elif record.label == "pending" or record.incident_onset is not None:
                continue
            elif (episode := self._touching(record, serious)) is not None:
                changed += self._doubt(record, episode)
            elif record.label == "candidate" and step >= record.step + self.healthy_steps:
                changed.append(self._label(record, "good", f"{self.healthy_steps} healthy steps"))
        return changed

    def _touching(self, record: CheckpointRecord, serious: Sequence[Trouble]) -> Episode | None:
        """The incident that keeps a checkpoint from being good, if any; of a good one, among those that are open."""
        names = {item.incident for item in serious}
        among = self._episodes if record.label != "good" else self._episodes.of(names)
        found = [episode for episode in among if episode.touches(record.step, self.healthy_steps)]
        return min(found, key=lambda episode: (episode.is_ahead, episode.onset_step), default=None)

    def _doubt(self, record: CheckpointRecord, episode: Episode) -> list[CheckpointRecord]:
        since = f"{episode.detector} of step {episode.onset_step}"
        if episode.is_ahead:
            reason = f"waits until {since} has been passed without it: {episode.why}"
            return [] if reason == record.reason else [self._label(record, "candidate", reason)]
        reason = f"{episode.detector} began at step {episode.onset_step}, within its healthy steps"
        if record.step >= episode.onset_step:
            reason = f"saved inside {since}: {episode.why}"
        return [self._label(record, "candidate", reason, incident_onset=episode.onset_step)]

    def rolled_back(self, target_step: int, onset_step: int, attempt: int) -> list[CheckpointRecord]:
        """The run went back: taint what the abandoned timeline saved after the target."""
        changed = []
        for record in self.records():
            if record.step > target_step and record.attempt < attempt and record.label != "tainted":
                reason = f"timeline left by the rollback to step {target_step} (onset {onset_step})"
                changed.append(self._label(record, "tainted", reason))
            elif record.incident_onset is not None and record.incident_onset > target_step:
                # Its healthy steps are made again, in the new timeline.
                changed.append(self._label(record, record.label, ""))
        self._episodes.restarted(target_step)
        self._goes_on_from(target_step)
        return changed

    def _goes_on_from(self, step: int) -> None:
        for record in self.records():
            onset = record.incident_onset
            if record.step == step and record.label != "tainted" and onset is not None and onset <= step:
                self._episodes.went_on_inside(record.checkpoint, onset, step)

    def _label(
        self, record: CheckpointRecord, label: CheckpointLabel, reason: str, incident_onset: int | None = None
    ) -> CheckpointRecord:
        changed = msgspec.structs.replace(record, label=label, reason=reason, incident_onset=incident_onset)
        self._keep(changed)
        return changed

    def _keep(self, record: CheckpointRecord) -> None:
        self._records[record.checkpoint] = record
        if record.label in {"pending", "candidate"} and record.incident_onset is None:
            self._unsettled.add(record.checkpoint)
        else:
            self._unsettled.discard(record.checkpoint)
