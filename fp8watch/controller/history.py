"""Scalars of the last few hundred steps of the current timeline, from which parameters and outcomes are computed."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from fp8watch.detect.base import Sample

KEEP_STEPS = 1024
NORMS = 256
CLIPS = 300
"""Steps over which the share of clipped steps is taken, as in `fp8watch.actions.clip_control`."""


class History:
    """Scalars by step. A rollback forgets the steps that it undid."""

    def __init__(self) -> None:
        self.losses: deque[tuple[int, float]] = deque(maxlen=KEEP_STEPS)
        self.learning_rates: deque[tuple[int, float, float]] = deque(maxlen=KEEP_STEPS)
        self._norms: deque[float] = deque(maxlen=NORMS)
        self._clipped: deque[bool] = deque(maxlen=CLIPS)
        self.num_skipped = 0
        self.params_nonfinite = False
        self.is_nonfinite_now = False

    def add(self, sample: Sample) -> None:
        """Add one step."""
        scalars = sample.scalars
        if "loss" in scalars:
            self.losses.append((sample.step, scalars["loss"]))
        if "learning_rate" in scalars:
            self.learning_rates.append((sample.step, scalars["learning_rate"], scalars.get("lr_factor", 1.0)))
        norm = scalars.get("grad_norm")
        if norm is not None and math.isfinite(norm):
            self._norms.append(norm)
            limit = scalars.get("clip_limit")
            if limit is not None:
                self._clipped.append(norm > limit)
        is_skipped = scalars.get("update_skipped", 0.0) > 0
        self.num_skipped = self.num_skipped + 1 if is_skipped else 0
        self.params_nonfinite = scalars.get("param_nonfinite", 0.0) > 0
        values = [scalars[name] for name in ("loss", "grad_norm") if name in scalars]
        self.is_nonfinite_now = self.params_nonfinite or any(not math.isfinite(value) for value in values)

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`."""
        while self.losses and self.losses[-1][0] > step:
            self.losses.pop()
        while self.learning_rates and self.learning_rates[-1][0] > step:
            self.learning_rates.pop()
        self.num_skipped = 0
        self.params_nonfinite = self.is_nonfinite_now = False

    def grad_norm_median(self) -> float | None:
        """Median of the recent finite norms; None before the first one."""
        return median(self._norms) if self._norms else None

    def clip_rate(self) -> float | None:
        """Share of the last 300 steps that were clipped; None with fewer steps."""
        return sum(self._clipped) / CLIPS if len(self._clipped) == CLIPS else None
