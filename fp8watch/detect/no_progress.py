"""no_progress: steps go by and the parameters are not updated.

A loss scaler that overflows skips the update and halves its scale. That is normal now and then: the scale doubles after
some thousand good steps, meets the limit and halves. It is a warning when
- the scale has been halved in `HALVINGS` steps in a row; the evidence says how many more it takes to reach 1, where
  most trainers give up, so that there is time to do something about it;
- `SKIPS` updates in a row were skipped, or half of the last `WINDOW`.
Never an act symptom: whatever makes gradients overflow has detectors of its own. Source: detector catalogue, "training
in place"; the scaler's rules are those of torch.amp.GradScaler (backoff 0.5, growth after 2,000 steps).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fp8watch.detect.base import Sample, Symptom

HALVINGS = 4
"""A healthy scaler that starts at 65,536 halves a few times at the beginning: see `SETTLED`."""
SETTLED = 64
"""Updates after which a scaler has found its level; before that, twice as many halvings are part of its search."""
SKIPS = 8
WINDOW = 64
SHARE = 0.5
LEAST_SCALE = 1.0


class NoProgressState(msgspec.Struct):
    """The scale and its halvings in a row, and which of the newest updates were skipped."""

    scale: float = 0.0
    halvings: int = 0
    skips: int = 0
    skipped: list[bool] = []
    """Whether each of the newest steps was skipped, oldest first."""
    updates: int = 0
    """Updates done so far."""
    since: int = -1


class NoProgress:
    """Skipped updates and a falling loss scale."""

    name = "no_progress"

    def start(self) -> NoProgressState:
        """The state before any sample."""
        return NoProgressState()

    def rolled_back(self, state: NoProgressState, step: int) -> NoProgressState:
        """The skipped steps are undone."""
        return NoProgressState(updates=state.updates)

    def update(self, state: NoProgressState, sample: Sample) -> tuple[NoProgressState, list[Symptom]]:
        """Look at one step; steps without a loss scale or a flag that says whether they were skipped are ignored."""
        scale, flag = sample.scalars.get("loss_scale"), sample.scalars.get("update_skipped")
        if scale is None and flag is None:
            return state, []
        is_skipped = flag is not None and flag > 0
        if scale is not None and math.isfinite(scale) and scale > 0:
            is_halved = 0 < scale <= 0.5 * state.scale
            state.halvings = state.halvings + 1 if is_halved else 0
            state.scale = scale
        state.skips = state.skips + 1 if is_skipped else 0
        state.updates += not is_skipped
        if flag is not None:
            state.skipped = [*state.skipped, is_skipped][-WINDOW:]
        share = sum(state.skipped) / WINDOW
        falling = state.halvings >= (HALVINGS if state.updates >= SETTLED else 2 * HALVINGS)
        if not (falling or state.skips >= SKIPS or share >= SHARE):
            state.since = -1
            return state, []
        if state.since < 0:
            state.since = max(1, sample.step - max(state.halvings, state.skips, 1) + 1)
        evidence: dict[str, Any] = {"skipped_in_a_row": state.skips, "skipped_ratio": round(share, 3)}
        if falling:
            evidence |= {
                "loss_scale": state.scale,
                "halvings": state.halvings,
                "minimum_in_steps": max(0, math.ceil(math.log2(state.scale / LEAST_SCALE))),
            }
        return state, [
            Symptom(detector=self.name, severity="warn", step=sample.step, onset_step=state.since, evidence=evidence)
        ]
