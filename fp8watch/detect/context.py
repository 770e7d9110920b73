"""The window that attribution looks back on: scalars of the newest steps, and all their symptoms, reported or not."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.records import Severity

LENGTH = 128
"""Length of the window in samples."""
SCALARS = ("loss", "grad_norm", "learning_rate", "update_rms", "loss_micro_max", "loss_micro_median")


class Seen(msgspec.Struct, kw_only=True):
    """The parts of a symptom that attribution needs."""

    detector: str
    severity: Severity
    step: int
    onset_step: int
    rank: int | None = None
    evidence: dict[str, Any] = {}


class Probe(msgspec.Struct):
    """Comparison of a layer's FP8 GEMM with the same GEMM in BF16."""

    step: int
    module: str
    error: float
    """Relative error; NaN where a result was not finite."""


class Context(msgspec.Struct):
    """A sliding window, oldest first."""

    steps: list[int] = []
    scalars: list[dict[str, float]] = []
    medians: list[dict[str, float]] = []
    """The same scalars as medians over ranks; empty in a run of one rank."""
    seen: list[Seen] = []
    probes: list[Probe] = []
    num_ranks: int = 1

    def push(self, sample: Sample, symptoms: list[Symptom]) -> None:
        """Add one step and its symptoms."""
        self.steps.append(sample.step)
        self.scalars.append(_known(sample.scalars))
        self.medians.append(_known(sample.rank_median))
        self.num_ranks = sample.num_ranks
        if "shadow_error" in sample.values:
            self._probed(sample)
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
            del self.steps[0], self.scalars[0], self.medians[0]
        self.seen = [seen for seen in self.seen if seen.step >= self.steps[0]]
        self.probes = [probe for probe in self.probes if probe.step >= self.steps[0]]

    def _probed(self, sample: Sample) -> None:
        errors, valid = sample.values["shadow_error"], sample.valid.get("shadow_error")
        for row in range(len(errors)) if valid is None else np.flatnonzero(valid):
            self.probes.append(Probe(sample.step, sample.tensors[int(row)].module, float(errors[int(row)])))

    def cut(self, step: int) -> None:
        """Roll back to `step`: forget later steps."""
        keep = sum(seen <= step for seen in self.steps)
        self.steps, self.scalars, self.medians = self.steps[:keep], self.scalars[:keep], self.medians[:keep]
        self.probes = [probe for probe in self.probes if probe.step <= step]
        self.seen = [seen for seen in self.seen if seen.step <= step]

    def series(self, name: str, first: int, last: int) -> list[float]:
        """Finite values of a scalar in steps first to last, inclusive."""
        return [
            row[name]
            for step, row in zip(self.steps, self.scalars, strict=True)
            if first <= step <= last and name in row and math.isfinite(row[name])
        ]

    def is_one_rank(self, name: str) -> bool:
        """Whether fewer than half of the ranks are out of range in the newest step, so that their median is ordinary.

        False where that is unknown: fewer than three ranks, or no past to compare with.
        """
        if self.num_ranks < 3 or not self.medians or name not in self.medians[-1]:
            return False
        middle, now = self.medians[-1][name], self.scalars[-1].get(name, math.nan)
        past = [row[name] for row in self.medians[-17:-1] if name in row and math.isfinite(row[name])]
        if not math.isfinite(middle) or len(past) < 4:
            return math.isfinite(middle) and not math.isfinite(now)
        usual, spread = float(np.median(past)), float(np.ptp(past))
        return abs(middle - usual) <= spread and not abs(now - usual) <= spread

    def stride(self) -> int:
        """Steps between the two newest samples."""
        return max(1, self.steps[-1] - self.steps[-2]) if len(self.steps) > 1 else 1

    def find(self, detector: str, severity: Severity | None = None, since: int = 0) -> Seen | None:
        """The newest symptom of a detector at or after step `since`, of this severity if one is given."""
        for seen in reversed(self.seen):
            if seen.detector == detector and seen.step >= since and severity in (None, seen.severity):
                return seen
        return None


def _known(scalars: dict[str, float]) -> dict[str, float]:
    return {name: scalars[name] for name in SCALARS if name in scalars} if scalars else {}
