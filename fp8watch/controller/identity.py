"""The identity of a stored record: its kind, its step, and the key by which a later record replaces it."""

from __future__ import annotations

from fp8watch.records import (
    ActionRecord,
    Arrival,
    CheckpointRecord,
    CommandResult,
    DetectorState,
    Evaluation,
    Finding,
    Layout,
    RunRecord,
    StepFrame,
    Stored,
    TraceEntry,
)

KINDS: dict[type, str] = {
    RunRecord: "run",
    Layout: "layout",
    StepFrame: "frame",
    Finding: "finding",
    ActionRecord: "action",
    CheckpointRecord: "checkpoint",
    CommandResult: "result",
    Evaluation: "evaluation",
    TraceEntry: "trace",
    Arrival: "arrival",
    DetectorState: "detectors",
}
"""Record type -> name of its kind in a store."""


def step_of(record: Stored) -> int | None:
    """The optimizer step by which a record is selected; None for records without one."""
    if isinstance(record, RunRecord | Layout | Arrival | DetectorState):
        return None
    if isinstance(record, ActionRecord):
        return record.decided_step
    return record.step


def key_of(record: Stored) -> str | None:
    """Identity within (run, kind): a later record with the same key replaces an earlier one. None: all are kept."""
    if isinstance(record, RunRecord | DetectorState):
        return record.run
    if isinstance(record, ActionRecord | Finding):
        return record.id
    if isinstance(record, CheckpointRecord):
        return record.checkpoint
    if isinstance(record, StepFrame):
        return f"{record.attempt}/{record.rank}/{record.step}"
    if isinstance(record, Layout):
        return f"{record.attempt}/{record.rank}/{record.layout_id}"
    return None
