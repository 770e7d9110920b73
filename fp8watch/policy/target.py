"""Which checkpoint a rollback goes to: the newest good one before the onset, never just the newest.

Damage begins before a detector fires, so it is the onset that tells which checkpoints are sound, not the alarm's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8watch.policy.rungs import Rollback
from fp8watch.records import CheckpointRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A choice and its reason. `checkpoint` None: there is nothing to go back to, for that reason."""

    checkpoint: CheckpointRecord | None
    reason: str


def choose_target(
    checkpoints: Sequence[CheckpointRecord],
    *,
    onset_step: int,
    rung: Rollback,
    used: Mapping[str, int],
    per_checkpoint: int,
) -> Target:
    """The newest checkpoint labelled good that is at least `rung.margin_steps` before the onset; where there is none
    and the rung allows it, the newest candidate.

    "Step n" means n updates done, so a checkpoint of step onset - 1 holds the last state before the trouble.
    `used`: earlier rollbacks per checkpoint; a checkpoint with `per_checkpoint` of them is passed over.
    """
    if not checkpoints:
        return Target(checkpoint=None, reason="nothing to roll back to: no checkpoint has been saved")
    passed: list[str] = []
    candidate: CheckpointRecord | None = None
    for record in sorted(checkpoints, key=lambda item: item.step, reverse=True):
        refusal = _refusal(record, onset_step, rung, used, per_checkpoint)
        if refusal is None and record.label == "good":
            return _chosen(record, "good", onset_step, rung, passed)
        if refusal is None:
            candidate = candidate or record
            refusal = f"{record.label}, not known to be good"
        passed.append(f"step {record.step} passed over: {refusal}")
    if candidate is not None and rung.if_none_is_good == "candidate":
        return _chosen(candidate, "candidate (none is known to be good)", onset_step, rung, [])
    reason = f"nothing to roll back to before onset {onset_step}"
    return Target(checkpoint=None, reason="; ".join([reason, *passed[:4]]))


def _chosen(record: CheckpointRecord, what: str, onset_step: int, rung: Rollback, passed: list[str]) -> Target:
    reason = (
        f"newest {what} checkpoint before onset {onset_step}: step {record.step}, {onset_step - record.step} steps "
        f"before the onset (margin {rung.margin_steps})"
    )
    return Target(checkpoint=record, reason="; ".join([reason, *passed[:4]]))


def _refusal(
    record: CheckpointRecord, onset_step: int, rung: Rollback, used: Mapping[str, int], per_checkpoint: int
) -> str | None:
    if not record.path:
        return "rotated away"
    if record.step >= onset_step - rung.margin_steps:
        return f"not {rung.margin_steps + 1} steps before the onset"
    if record.label == "tainted":
        return record.reason or "tainted"
    if record.label not in {"good", "candidate"}:
        return f"{record.label}, not known to be good"
    if used.get(record.checkpoint, 0) >= per_checkpoint:
        return f"already gone back to {used.get(record.checkpoint, 0)} times"
    if not record.has_data_position and rung.if_data_position_missing == "refuse":
        return "has no data position"
    return None
