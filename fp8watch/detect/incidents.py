"""Incidents: the symptoms of one detector, from the first to well after the last, reported at most twice.

An incident gives one `Finding` when it opens and one more when a warning becomes a case to act. It closes after
`CLOSE_AFTER` samples without a symptom and reports nothing new until then (hysteresis: a ratio that hovers at its limit
is one incident).
"""

from __future__ import annotations

from typing import Any

import msgspec

from fp8watch.records import Cause, Severity

CLOSE_AFTER = 20
"""Samples without a symptom after which an incident closes: the settling window of the shortest action."""
PAUSE_SAMPLES = 4
"""Silence after which the next symptom starts a new spell: the same incident, with a later onset."""
CLOSE_SPIKE_AFTER = 4
"""The same for loss spikes: a spike ends after five ordinary points in a row, and the next one is another incident."""


class Incident(msgspec.Struct, kw_only=True):
    """One event as one detector sees it. Its id is `Finding.incident`."""

    id: str
    detector: str
    severity: Severity
    cause: Cause
    attempt: int
    onset_step: int
    first_step: int
    """Step of the first finding."""
    last_seen_step: int
    layers: list[str] = []
    """Modules affected so far, worst first by the newest symptom."""
    tensors: list[str] = []
    """Tensors affected so far (`module:tensor`), in the same order."""
    rank: int | None = None
    evidence: dict[str, Any] = {}
    """Evidence of the newest symptom, with the reasons for the cause as of the newest finding."""
    findings: list[str] = []
    """Ids of the findings written."""
    silent_samples: int = 0
    spell_onset: int = 0
    """Onset of the symptoms since the last pause of more than `PAUSE_SAMPLES`."""


class Incidents(msgspec.Struct):
    """The open incidents, by detector."""

    open: dict[str, Incident] = {}
    num_incidents: int = 0
    num_findings: int = 0

    def age(self) -> list[Incident]:
        """Count one more sample; removes and returns the incidents that have been silent long enough."""
        closed = []
        for detector, incident in list(self.open.items()):
            incident.silent_samples += 1
            if incident.silent_samples > (CLOSE_SPIKE_AFTER if detector == "loss_spike" else CLOSE_AFTER):
                closed.append(self.open.pop(detector))
        return closed

    def next_incident(self) -> str:
        """A new id, unique in this run."""
        self.num_incidents += 1
        return f"i{self.num_incidents:05d}"

    def next_finding(self) -> str:
        """A new id, unique in this run."""
        self.num_findings += 1
        return f"f{self.num_findings:05d}"
