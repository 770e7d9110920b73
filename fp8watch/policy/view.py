"""What a decision is made from: the run after a step, in plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from fp8watch.detect.incidents import Incident
from fp8watch.records import Cause, CheckpointRecord, Severity
from fp8watch.what_if import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An open incident as the policy sees it."""

    incident: str
    detector: str
    cause: Cause
    severity: Severity
    onset_step: int
    first_step: int
    """Step at which it was found."""
    last_seen_step: int
    rank: int | None = None
    """The only rank concerned; None: several ranks, or unknown."""
    layers: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    """`module:tensor`, worst first."""
    finding: str = ""
    """Id of its newest finding."""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def trouble_of(incident: Incident, *, name: str, finding: str, evidence: Mapping[str, Any]) -> Trouble:
    """An incident with its newest finding, under the name that the run uses for it."""
    return Trouble(
        incident=name,
        detector=incident.detector,
        cause=incident.cause,
        severity=incident.severity,
        onset_step=incident.onset_step,
        first_step=incident.first_step,
        last_seen_step=incident.last_seen_step,
        rank=incident.rank,
        layers=tuple(incident.layers),
        tensors=tuple(incident.tensors),
        finding=finding,
        evidence=evidence,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run after one optimizer step. A rollback winds `step` back, but never `seen` (the number of steps observed)."""

    run: str
    step: int
    seen: int
    attempt: int = 0
    term: int = 1
    """Term of the controller; part of every action's id, so that a controller that lost its memory repeats none."""
    time_unix: float = 0.0
    troubles: tuple[Trouble, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Action -> why this run cannot do it."""
    checkpoints: tuple[CheckpointRecord, ...] = ()
    warmup_steps: int | None = None
    is_warming_up: bool = False
    """The learning rate has risen since the first step, and the end of the warm-up is unknown."""
    modules: tuple[str, ...] = ()
    """All FP8 modules seen."""
    tensors: tuple[str, ...] = ()
    """All FP8 tensors seen, `module:tensor`."""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, loss) of the newest steps of this timeline, oldest first."""
    learning_rates: tuple[tuple[int, float, float], ...] = ()
    """(step, LR in force, our factor in it) of the newest steps, oldest first."""
    what_if: Mapping[str, Comparison] = field(default_factory=dict)
    """`module:tensor` -> what its cast loses, and would lose under other recipes, at the latest look."""
    grad_norm_median: float | None = None
    """Median of the recent finite norms before clipping."""
    num_skipped: int = 0
    """Updates in a row, up to this step, that the ranks skipped."""
    params_nonfinite: bool = False
    is_nonfinite_now: bool = False
    """Whether loss, gradient norm or parameters of this step are not finite."""
    is_busy: bool = False
    """Whether a command is on its way."""
    disarmed: str = ""
    """Why nothing may be sent; empty: armed."""
    verdicts: Mapping[str, Literal["approve", "refuse"]] = field(default_factory=dict)
    """Action id -> what a person answered."""
    people: Mapping[str, str] = field(default_factory=dict)
    """Action id -> who answered."""
    since_start: int | None = None
    """Steps since a restart or rollback; None: there was none."""
    since_evaluation: int | None = None
    """Steps since the scores of an evaluation arrived; None: none have."""
    clip_rate: float | None = None
    """Share of the last 300 steps whose norm was above the clip limit in force; None with fewer steps."""

    def age(self, trouble: Trouble) -> int:
        """Steps since it was last seen."""
        return max(0, self.step - trouble.last_seen_step)

    def loss_excess(self, onset_step: int) -> float | None:
        """(median of the last 5 losses) / (median of the 32 before the onset) - 1; infinite if the loss is not finite
        now.

        None where either is unknown.
        """
        before = [loss for step, loss in self.losses if step < onset_step and math.isfinite(loss)][-32:]
        now = [loss for _, loss in self.losses][-5:]
        if len(before) < 5 or not now:
            return None
        if not all(math.isfinite(loss) for loss in now):
            return math.inf
        level = median(before)
        return median(now) / level - 1.0 if level > 0 else None

    def lr_level(self, onset_step: int) -> tuple[float, float] | None:
        """(scheduled LR before the onset: median of 16 steps, scheduled LR now), our factor taken out."""
        pairs = [(step, lr / factor) for step, lr, factor in self.learning_rates if factor > 0 and math.isfinite(lr)]
        before = [lr for step, lr in pairs if step < onset_step][-16:]
        if not before or not pairs:
            return None
        return median(before), pairs[-1][1]

    def scheduled_lr(self) -> float | None:
        """The LR that the schedule asks for now, our factor taken out; None if it was not observed."""
        if not self.learning_rates:
            return None
        _, lr, factor = self.learning_rates[-1]
        return lr / factor if factor > 0 and math.isfinite(lr) else None
