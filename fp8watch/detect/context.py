"""What attribution looks back on: the newest steps' scalars, and every symptom of them, reported or not."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fp8watch.detect.base import Sample, Symptom
from fp8watch.records import Severity

LENGTH = 128
"""Samples looked back on."""
SCALARS = ("loss", "grad_norm", "learning_rate", "update_rms")


class Seen(msgspec.Struct, kw_only=True):
    """A symptom, as far as attribution needs it."""

    detector: str
    severity: Severity
    step: int
    onset_step: int
    rank: int | None = None
    evidence: dict[str, Any] = {}


class Context(msgspec.Struct):
    """A sliding window, oldest first."""

    steps: list[int] = []
    scalars: list[dict[str, float]] = []
    seen: list[Seen] = []
    num_ranks: int = 1

    def push(self, sample: Sample, symptoms: list[Symptom]) -> None:
        """Take a step in."""
        self.steps.append(sample.step)
        self.scalars.append({name: sample.scalars[name] for name in SCALARS if name in sample.scalars})
        self.num_ranks = sample.num_ranks
        for symptom in symptoms:
            self.seen.append(
                Seen(
                    detector=symptom.detector,
                    severity=symptom.severity,
                    step=symptom.step,
                    onset_step=symptom.onset_step,
                    rank=symptom.rank,
                    evidence=symptom.evidence,
                )
            )
        if len(self.steps) > LENGTH:
            del self.steps[0], self.scalars[0]
        self.seen = [seen for seen in self.seen if seen.step >= self.steps[0]]

    def cut(self, step: int) -> None:
        """A rollback to `step`: later steps did not happen."""
        keep = sum(seen <= step for seen in self.steps)
        self.steps, self.scalars = self.steps[:keep], self.scalars[:keep]
        self.seen = [seen for seen in self.seen if seen.step <= step]

    def series(self, name: str, first: int, last: int) -> list[float]:
        """Finite values of a scalar in steps first..last, both included."""
        return [
            row[name]
            for step, row in zip(self.steps, self.scalars, strict=True)
            if first <= step <= last and name in row and math.isfinite(row[name])
        ]

    def stride(self) -> int:
        """Steps between the two newest samples."""
        return max(1, self.steps[-1] - self.steps[-2]) if len(self.steps) > 1 else 1

    def find(self, detector: str, severity: Severity | None = None, since: int = 0) -> Seen | None:
        """The newest symptom of a detector at or after a step, of this severity if given."""
        for seen in reversed(self.seen):
            if seen.detector == detector and seen.step >= since and severity in (None, seen.severity):
                return seen
        return None
