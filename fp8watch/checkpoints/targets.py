"""Which checkpoint a rank falls back to when the one it was told to restore is damaged, and which it resumes from.

The controller's own choice, with budgets and reasons, is `fp8watch.policy.target`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8watch.records import CheckpointRecord


def rollback_target(
    records: Sequence[CheckpointRecord], onset_step: int, *, exclude: Sequence[str] = ()
) -> CheckpointRecord | None:
    """The newest checkpoint from before the onset, good ones before candidates; None: there is none.

    The onset is the first step that the fault touched, so a checkpoint of an earlier step is clean, while the
    newest of all may already hold the damage (it begins before the loss shows it). A good one wins over a newer
    candidate: a candidate has not yet been followed by enough healthy steps for its own onset to have shown.
    """
    usable = [record for record in records if record.step < onset_step and record.checkpoint not in exclude]
    for label in ("good", "candidate"):
        labelled = [record for record in usable if record.label == label]
        if labelled:
            return max(labelled, key=lambda record: (record.step, record.attempt, record.time_unix))
    return None


def resume_candidates(records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """Checkpoints a restart may use, the newest saved first (`records` are in the order of saving)."""
    return [record for record in reversed(records) if record.label in ("good", "candidate")]
