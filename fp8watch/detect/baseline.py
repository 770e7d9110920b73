"""A robust baseline of one scalar series: what the run itself has shown to be ordinary.

The last `WINDOW` accepted points (outliers are kept out by the caller) give a centre, the median of the
newest `RECENT`, and a noise, 1.4826 * MAD of the residuals of a straight line through the window, so that a
falling loss does not inflate it. A second noise looks at the upper tail only: the 90 % quantile of what every point,
also one that was kept out, lay above the centre. In most runs it is the smaller one; where single high points
are everyday life (strong augmentation, bimodal losses) it is the one that counts.
Source: detector defaults D5 (median and MAD of accepted points); line and tail answer to training curves, whose
level moves more than their noise and whose noise is skewed.
"""

from __future__ import annotations

import math
import statistics

import msgspec
import numpy as np

WINDOW = 128
"""Accepted points kept (OLMo-core's StabilityMonitor uses the same length)."""
RECENT = 32
"""Newest accepted points whose median is the centre."""
TAIL_QUANTILE = 0.9
TAIL_TO_SIGMA = 1.0 / 1.2816
"""The 90 % quantile of a normal distribution lies at 1.2816 standard deviations."""
MAD_TO_SIGMA = 1.4826
"""MAD to standard deviation for a normal distribution."""


class Baseline(msgspec.Struct):
    """Accepted points with the steps at which they were seen, and what follows from them."""

    steps: list[int] = []
    points: list[float] = []
    centre: float = math.nan
    """Median of the newest RECENT accepted points."""
    noise: float = math.nan
    """Robust standard deviation around the window's trend, same unit as the points."""
    excesses: list[float] = []
    """What the newest WINDOW points, also those kept out, lay above the centre at their time."""

    def __len__(self) -> int:
        return len(self.points)

    def accept(self, step: int, value: float) -> None:
        """Take an ordinary point in."""
        self.steps.append(step)
        self.points.append(value)
        if len(self.points) > WINDOW:
            del self.steps[0], self.points[0]
        self._refresh()

    def hear(self, excess: float) -> None:
        """Note how far a point lay above the centre, accepted or not."""
        self.excesses.append(excess)
        if len(self.excesses) > WINDOW:
            del self.excesses[0]

    def tail_noise(self) -> float:
        """Noise by the upper tail; 0 with fewer than 16 points."""
        if len(self.excesses) < 16:
            return 0.0
        return sorted(self.excesses)[int(TAIL_QUANTILE * (len(self.excesses) - 1))] * TAIL_TO_SIGMA

    def cut(self, step: int) -> None:
        """Forget every point after `step` (a rollback has made them untrue)."""
        keep = sum(seen <= step for seen in self.steps)
        del self.steps[keep:], self.points[keep:]
        self._refresh()

    def _refresh(self) -> None:
        if not self.points:
            self.centre = self.noise = math.nan
            return
        self.centre = statistics.median(self.points[-min(RECENT, max(1, len(self.points) // 2)) :])
        if len(self.points) < 3:
            self.noise = math.nan
            return
        values = np.asarray(self.points)
        x = np.arange(len(values)) - (len(values) - 1) / 2
        # Points near the largest float overflow; a noise that is not finite means that it is not known.
        with np.errstate(all="ignore"):
            residuals = values - values.mean() - x * (x @ values) / (x @ x)
            middle = statistics.median(residuals.tolist())
            self.noise = MAD_TO_SIGMA * statistics.median(np.abs(residuals - middle).tolist())
