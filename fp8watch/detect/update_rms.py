"""update_rms: the optimizer moves the parameters further than ever before, because the learning rate jumped.

A learning rate `JUMP`x above the largest of the run's accepted past (at least `MIN_POINTS` points) and 3x above the
value just before it has no precedent in the schedule: a warm-up rises by less than 2x per step after its first steps,
and a warm restart returns to a level already seen. Act when the size of the update follows (RMS of the parameter
change, 3x its median). Where the size of the update is not observed (logs) a jump stays a warning, because a schedule
may well intend it. An update size that leaves its own range without a jump is a warning too.

One rule needs no past: updates that move the parameters by `RATIO_LIMIT` of their own size in each of `RATIO_STEPS`
steps in a row are an act symptom, in warm-up too. The usual value is 1e-3 (a rule of thumb for small and large nets).
Small GPTs that train well reach 0.055 in the first steps; those whose warm-up is too short for their peak rate reach
0.15 to 0.18. The limit is absolute because a bad start is over before there is a baseline. A toy of a few parameters
under a rate of 0.1 may exceed it as well (a 4x4 layer with SGD: 0.09 to 0.14, and 1.3 to 1.6 where its loss explodes).

Two more rules have files of their own: a rate that climbs without a jump (`rate_creep`), and updates that leap although
rate and gradient are ordinary (`lost_moments`).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fp8watch.detect import lost_moments, rate_creep
from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.baseline import Baseline
from fp8watch.detect.lost_moments import Leap, MomentsState
from fp8watch.detect.rate_creep import Creep, CreepState

JUMP = 2.0
STEP_RATIO = 3.0
UPDATE_RATIO = 3.0
MIN_POINTS = 8
RATIO_LIMIT = 0.1
"""RMS of the update over RMS of the parameters that is too much for any run."""
RATIO_STEPS = 3
"""Steps in a row."""
FORGET_AFTER = 200
"""Points after which a new level, of rate or update, counts as intended."""


class UpdateRmsState(msgspec.Struct):
    """Learning rates seen, and the current jump."""

    points: int = 0
    largest: float = 0.0
    """Largest accepted learning rate."""
    last: float | None = None
    """Newest accepted learning rate."""
    jump_step: int | None = None
    jump_points: int = 0
    before: float = 0.0
    num_large: int = 0
    """Points in a row with an update of more than `UPDATE_RATIO`x its median."""
    over_ratio: int = 0
    """Steps in a row whose update is too large for the size of the parameters."""
    updates: Baseline = msgspec.field(default_factory=Baseline)
    """log update RMS of ordinary steps."""
    has_updates: bool = False
    """Whether the size of any update has been observed."""
    creep: CreepState = msgspec.field(default_factory=CreepState)
    moments: MomentsState = msgspec.field(default_factory=MomentsState)


class UpdateRms:
    """Learning rate and update size, compared with their own past."""

    name = "update_rms"

    def start(self) -> UpdateRmsState:
        """The state before any sample."""
        return UpdateRmsState()

    def rolled_back(self, state: UpdateRmsState, step: int) -> UpdateRmsState:
        """The accepted past stays valid; the jump is undone."""
        state.updates.cut(step)
        rate_creep.cut(state.creep, step)
        lost_moments.cut(state.moments, step)
        state.jump_step, state.jump_points, state.over_ratio, state.num_large = None, 0, 0, 0
        return state

    def update(self, state: UpdateRmsState, sample: Sample) -> tuple[UpdateRmsState, list[Symptom]]:
        """Look at one step."""
        rate, moved = sample.scalars.get("learning_rate"), sample.scalars.get("update_rms")
        if sample.scalars.get("update_skipped", 0.0) > 0:
            return state, []
        moved = moved if moved is not None and math.isfinite(moved) and moved > 0 else None
        ordinary = math.exp(state.updates.centre) if len(state.updates) >= MIN_POINTS else None
        follows = moved is not None and ordinary is not None and moved > UPDATE_RATIO * ordinary
        rate = rate if rate is not None and math.isfinite(rate) and rate >= 0 else None
        jumped = rate is not None and self._jumped(state, sample.step, rate)
        creep, leap = _slower(state, sample, rate, moved)
        symptoms = []
        if jumped:
            symptoms.append(self._symptom(state, sample, "act" if follows else "warn", rate, moved, ordinary))
        elif self._is_over_ratio(state, sample):
            symptoms.append(self._symptom(state, sample, "act", rate, moved, ordinary))
        elif leap is not None:
            symptoms.append(_leapt(sample, leap, moved, ordinary))
        elif creep is not None and (creep.follows or creep.loss_sigmas > rate_creep.SIGMAS):
            symptoms.append(_crept(sample, creep, moved))
        elif follows:
            symptoms.append(self._symptom(state, sample, "warn", rate, moved, ordinary))
        if moved is not None:
            state.num_large = state.num_large + 1 if follows else 0
            if not symptoms or state.num_large > FORGET_AFTER:
                state.updates.accept(sample.step, math.log(moved))
        return state, symptoms

    def _is_over_ratio(self, state: UpdateRmsState, sample: Sample) -> bool:
        ratio = sample.scalars.get("update_ratio")
        if ratio is not None:
            state.over_ratio = state.over_ratio + 1 if ratio >= RATIO_LIMIT else 0
        return state.over_ratio >= RATIO_STEPS

    def _jumped(self, state: UpdateRmsState, step: int, rate: float) -> bool:
        if state.jump_step is not None:
            state.jump_points += 1
            if rate > JUMP * state.largest and state.jump_points < FORGET_AFTER:
                return True
            state.jump_step, state.jump_points = None, 0
        elif (
            state.points >= MIN_POINTS
            and state.last is not None
            and state.largest > 0
            and rate > JUMP * state.largest
            and rate > STEP_RATIO * state.last
        ):
            state.jump_step, state.jump_points, state.before = step, 1, state.last
            return True
        state.points += 1
        state.largest, state.last = max(state.largest, rate), rate
        return False

    def _symptom(
        self,
        state: UpdateRmsState,
        sample: Sample,
        severity: str,
        rate: float | None,
        moved: float | None,
        ordinary: float | None,
    ) -> Symptom:
        evidence: dict[str, Any] = {}
        onset = sample.step if state.jump_step is None else state.jump_step
        if state.jump_step is not None and rate is not None:
            evidence |= {
                "learning_rate": rate,
                "learning_rate_before": state.before,
                "learning_rate_ratio": round(rate / state.before, 3) if state.before > 0 else None,
            }
        elif state.over_ratio >= RATIO_STEPS:
            evidence |= {"update_ratio": sample.scalars.get("update_ratio"), "update_ratio_limit": RATIO_LIMIT}
            onset = sample.step - (state.over_ratio - 1)
        if moved is not None:
            evidence |= {"update_rms": moved, "ordinary_update_rms": ordinary}
        return Symptom(
            detector=self.name,
            severity="act" if severity == "act" else "warn",
            step=sample.step,
            onset_step=max(1, onset),
            evidence=evidence,
        )


def _slower(
    state: UpdateRmsState, sample: Sample, rate: float | None, moved: float | None
) -> tuple[Creep | None, Leap | None]:
    """The verdicts of the two rules with files of their own. Both need updates, so logs, which have none, skip them."""
    state.has_updates = state.has_updates or moved is not None
    if rate is None or not state.has_updates:
        return None, None
    loss, norm = sample.scalars.get("loss"), sample.scalars.get("grad_norm")
    loss = loss if loss is not None and math.isfinite(loss) else None
    norm = norm if norm is not None and math.isfinite(norm) and norm > 0 else None
    limit = sample.scalars.get("clip_limit", math.inf)
    felt = min(norm, limit) if norm is not None and limit > 0 else norm
    creep = rate_creep.follow(state.creep, sample.step, rate, moved, loss)
    leap = lost_moments.follow(
        state.moments, sample.step, rate=rate, moved=moved, ratio=sample.scalars.get("update_ratio"), norm=felt,
        loss=loss,
    )  # fmt: skip
    return creep, leap


def _crept(sample: Sample, creep: Creep, moved: float | None) -> Symptom:
    rate = sample.scalars["learning_rate"]
    evidence: dict[str, Any] = {
        "learning_rate": rate,
        "learning_rate_before": creep.before,
        "learning_rate_ratio": round(rate / creep.before, 3),
        "is_creeping": True,
        "loss_sigmas": round(creep.loss_sigmas, 1) if math.isfinite(creep.loss_sigmas) else None,
    }
    if moved is not None:
        evidence["update_rms"] = moved
    return Symptom(
        detector=UpdateRms.name,
        severity="act" if creep.is_harmful else "warn",
        step=sample.step,
        onset_step=creep.onset_step,
        evidence=evidence,
    )


def _leapt(sample: Sample, leap: Leap, moved: float | None, ordinary: float | None) -> Symptom:
    evidence: dict[str, Any] = {
        "update_leap_ratio": round(leap.times, 2),
        "grad_norm_ratio": round(leap.gradient_times, 2),
        "is_felt": leap.is_felt,
    }
    if moved is not None:
        evidence |= {"update_rms": moved, "ordinary_update_rms": ordinary}
    return Symptom(
        detector=UpdateRms.name,
        severity="act" if leap.is_felt else "warn",
        step=sample.step,
        onset_step=leap.onset_step,
        evidence=evidence,
    )
