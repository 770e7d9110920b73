"""Incidents: the symptoms of one detector, from the first to well after the last, as one thing with two lines at most.

An incident gives one `Finding` when it opens and one more when a warning becomes a case to act. It closes after
`CLOSE_AFTER` samples without a symptom; until then nothing is said again (hysteresis: a ratio that hovers at its
limit is one incident).
"""

from __future__ import annotations

from typing import Any

import msgspec

from fp8watch.records import Cause, Severity

CLOSE_AFTER = 20
"""Samples without a symptom that close an incident: the settling window of the shortest action."""
PAUSE_SAMPLES = 4
"""Silence after which what comes is the next spell: the same incident, but no longer the same beginning."""
CLOSE_SPIKE_AFTER = 4
"""The same for loss spikes: five ordinary points in a row are the end of one, the next is another."""


class Incident(msgspec.Struct, kw_only=True):
    """One event as one detector sees it. `Finding.incident` holds its id."""

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
    """Modules concerned so far, worst first as of the newest symptom."""
    tensors: list[str] = []
    """`module:tensor` concerned so far, likewise."""
    rank: int | None = None
    evidence: dict[str, Any] = {}
    """Of the newest symptom, with the reasons for the cause as they were at the newest finding."""
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
        """One more sample: take out and return the incidents that have been silent long enough."""
        closed = []
        for detector, incident in list(self.open.items()):
            incident.silent_samples += 1
            if incident.silent_samples > (CLOSE_SPIKE_AFTER if detector == "loss_spike" else CLOSE_AFTER):
                closed.append(self.open.pop(detector))
        return closed

    def next_incident(self) -> str:
        """An id that is new in this run."""
        self.num_incidents += 1
        return f"i{self.num_incidents:05d}"

    def next_finding(self) -> str:
        """An id that is new in this run."""
        self.num_findings += 1
        return f"f{self.num_findings:05d}"
