"""update_rms: the optimizer moves the parameters further than it ever did, because the learning rate jumped.

A learning rate `JUMP`x above the largest of the run's accepted past (with at least `MIN_POINTS` points of it) and
3x above the value before it has no precedent in the schedule: a warm-up rises by less than 2x a step after its
first steps, a warm restart returns to a level already seen. Act when the size of the update follows it (RMS of
the parameter change, 3x its median); where the update's size is not observed (logs) a jump stays a warning, for a
schedule may well mean it. An update size that leaves its range alone is a warning too.

Without any past: updates that move the parameters by `RATIO_LIMIT` of their own size in each of `RATIO_STEPS` steps
in a row are an act symptom, in warm-up too. Usual is 1e-3 (a rule of thumb for small nets and large); small GPTs
that train well reach 0.055 in the first steps, those whose warm-up is too short for their peak rate 0.15 to 0.18.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.baseline import Baseline

JUMP = 2.0
STEP_RATIO = 3.0
UPDATE_RATIO = 3.0
MIN_POINTS = 8
RATIO_LIMIT = 0.1
"""RMS of the update over RMS of the parameters that is too much for any run."""
RATIO_STEPS = 3
"""Steps in a row."""
FORGET_AFTER = 200
"""Points after which the new level counts as meant."""


class UpdateRmsState(msgspec.Struct):
    """Learning rates seen, and the jump under way."""

    points: int = 0
    largest: float = 0.0
    """Largest accepted learning rate."""
    last: float | None = None
    """Newest accepted learning rate."""
    jump_step: int | None = None
    jump_points: int = 0
    before: float = 0.0
    over_ratio: int = 0
    """Steps in a row with too large an update for the parameters' size."""
    updates: Baseline = msgspec.field(default_factory=Baseline)
    """log update RMS of ordinary steps."""


class UpdateRms:
    """Learning rate and update size against their own past."""

    name = "update_rms"

    def start(self) -> UpdateRmsState:
        """No past."""
        return UpdateRmsState()

    def rolled_back(self, state: UpdateRmsState, step: int) -> UpdateRmsState:
        """The accepted past stays true; the jump is undone."""
        state.updates.cut(step)
        state.jump_step, state.jump_points, state.over_ratio = None, 0, 0
        return state

    def update(self, state: UpdateRmsState, sample: Sample) -> tuple[UpdateRmsState, list[Symptom]]:
        """Look at one step."""
        rate, moved = sample.scalars.get("learning_rate"), sample.scalars.get("update_rms")
        if sample.scalars.get("update_skipped", 0.0) > 0:
            return state, []
        moved = moved if moved is not None and math.isfinite(moved) and moved > 0 else None
        ordinary = math.exp(state.updates.centre) if len(state.updates) >= MIN_POINTS else None
        follows = moved is not None and ordinary is not None and moved > UPDATE_RATIO * ordinary
        jumped = rate is not None and math.isfinite(rate) and self._jumped(state, sample.step, rate)
        symptoms = []
        if jumped:
            symptoms.append(self._symptom(state, sample, "act" if follows else "warn", rate, moved, ordinary))
        elif self._is_over_ratio(state, sample):
            symptoms.append(self._symptom(state, sample, "act", rate, moved, ordinary))
        elif follows:
            symptoms.append(self._symptom(state, sample, "warn", rate, moved, ordinary))
        elif moved is not None:
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
