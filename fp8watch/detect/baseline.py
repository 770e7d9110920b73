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
from bisect import bisect_left, insort
from typing import Any

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
    excesses: list[float] = []
    """What the newest WINDOW points, also those kept out, lay above the centre at their time."""
    recent: list[float] = []
    """The newest accepted points, by size: what the centre is the median of."""
    ranked: list[float] = []
    """`excesses` by size."""

    def __len__(self) -> int:
        return len(self.points)

    def accept(self, step: int, value: float) -> None:
        """Take an ordinary point in."""
        points = self.points
        self.steps.append(step)
        points.append(value)
        insort(self.recent, value)
        if len(points) > WINDOW:
            del self.steps[0], points[0]
        # The centre looks at the newest RECENT points, or at half of what there is.
        wanted = min(RECENT, max(1, len(points) // 2))
        if len(self.recent) > wanted:
            oldest = points[-len(self.recent)]
            del self.recent[bisect_left(self.recent, oldest)]
        if len(self.recent) != wanted:
            self.recent = sorted(points[-wanted:])
        half = wanted // 2
        self.centre = self.recent[half] if wanted % 2 else (self.recent[half - 1] + self.recent[half]) / 2

    def hear(self, excess: float) -> None:
        """Note how far a point lay above the centre, accepted or not."""
        self.excesses.append(excess)
        insort(self.ranked, excess)
        if len(self.excesses) > WINDOW:
            del self.ranked[bisect_left(self.ranked, self.excesses[0])], self.excesses[0]

    def tail_noise(self) -> float:
        """Noise by the upper tail; 0 with fewer than 16 points."""
        if len(self.excesses) < 16:
            return 0.0
        return self.ranked[int(TAIL_QUANTILE * (len(self.ranked) - 1))] * TAIL_TO_SIGMA

    def cut(self, step: int) -> None:
        """Forget every point after `step` (a rollback has made them untrue)."""
        keep = sum(seen <= step for seen in self.steps)
        del self.steps[keep:], self.points[keep:]
        self.recent = sorted(self.points[-min(RECENT, max(1, keep // 2)) :])
        self.centre = statistics.median(self.recent) if self.recent else math.nan

    def noise(self) -> float:
        """Robust standard deviation around the window's trend, same unit as the points; NaN where it is not known.

        This is what costs (20 us): who can tell a point by `tail_noise` does not ask for it.
        """
        count = len(self.points)
        if count < 3:
            return math.nan
        values = np.array(self.points)
        x = np.arange(count) - (count - 1) / 2
        # Points near the largest float overflow; a noise that is not finite means that it is not known.
        with np.errstate(all="ignore"):
            residuals = values - values.mean() - x * (x @ values) / (x @ x)
            return MAD_TO_SIGMA * _median(np.abs(residuals - _median(residuals)))


def _median(values: np.ndarray[Any, Any]) -> float:
    half = len(values) // 2
    values = np.sort(values)
    return float(values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2)
