"""Selects the checkpoint that replaces a damaged rollback target, and the one to resume from.

The controller's own selection, with budgets and reasons, is `fp8watch.policy.target`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8watch.records import CheckpointRecord


def rollback_target(
    records: Sequence[CheckpointRecord], onset_step: int, *, exclude: Sequence[str] = ()
) -> CheckpointRecord | None:
    """The newest checkpoint before the onset, good ones before candidates; None: there is none.

    The onset is the first step that the fault touched, so an earlier checkpoint is clean. A later one may already hold
    the damage, before the loss shows it. A good one wins over a newer candidate, which has not been followed by enough
    healthy steps for an onset of its own to show.
    """
    usable = [record for record in records if record.step < onset_step and record.checkpoint not in exclude]
    for label in ("good", "candidate"):
        labelled = [record for record in usable if record.label == label]
        if labelled:
            return max(labelled, key=lambda record: (record.step, record.attempt, record.time_unix))
    return None


def resume_candidates(records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """Checkpoints that a restart may use, the newest saved first. `records` are in the order of saving."""
    return [record for record in reversed(records) if record.label in ("good", "candidate")]
