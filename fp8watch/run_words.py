"""The state of a run in plain words: the same in listings and on the console. Records keep their own for programs."""

from __future__ import annotations

from fp8watch.records import RunRecord

_ORDINARY = frozenset({"", "end"})
"""Reasons that add nothing to the state: the training reached its end."""


def reason(record: RunRecord) -> str:
    """Why the run is in its state; empty where the state says everything."""
    return "" if record.reason in _ORDINARY else record.reason


def state(record: RunRecord) -> str:
    """`ended`, or `halted: budget spent`."""
    return ": ".join(part for part in (record.state, reason(record)) if part)
