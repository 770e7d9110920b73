"""A robust baseline of one scalar series: what the run itself has shown to be ordinary.

The last `WINDOW` accepted points (the caller keeps outliers out) give a centre, the median of the newest `RECENT`, and
a noise, 1.4826 * MAD of the residuals of a straight line through the window, so that a falling loss does not inflate
it. A second noise looks at the upper tail only: the 90 % quantile of how far all points, rejected ones included, lay
above the centre. In most runs the second noise is the smaller one; where single high points are normal (strong
augmentation, bimodal losses) it is the larger and decides.
Source: detector defaults D5 (median and MAD of accepted points). The line and the tail were added because the level of
training curves moves by more than their noise, and their noise is skewed.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from typing import Any

import msgspec
import numpy as np

WINDOW = 128
"""Number of accepted points kept (OLMo-core's StabilityMonitor uses the same length)."""
RECENT = 32
"""Newest accepted points whose median is the centre."""
TAIL_QUANTILE = 0.9
TAIL_TO_SIGMA = 1.0 / 1.2816
"""The 90 % quantile of a normal distribution lies at 1.2816 standard deviations."""
MAD_TO_SIGMA = 1.4826
"""MAD to standard deviation, for a normal distribution."""


class Baseline(msgspec.Struct):
    """Accepted points with their steps, and the statistics derived from them."""

    steps: list[int] = []
    points: list[float] = []
    centre: float = math.nan
    """Median of the newest RECENT accepted points."""
    excesses: list[float] = []
    """How far each of the newest WINDOW points, rejected ones included, lay above the centre at its time."""
    recent: list[float] = []
    """The newest accepted points in ascending order; the centre is their median."""
    ranked: list[float] = []
    """`excesses` in ascending order."""

    def __len__(self) -> int:
        return len(self.points)

    def accept(self, step: int, value: float) -> None:
        """Add an ordinary point."""
        points = self.points
        self.steps.append(step)
        points.append(value)
        insort(self.recent, value)
        if len(points) > WINDOW:
            del self.steps[0], points[0]
        # The centre uses the newest RECENT points, or half of the points while there are few.
        wanted = min(RECENT, max(1, len(points) // 2))
        if len(self.recent) > wanted:
            oldest = points[-len(self.recent)]
            del self.recent[bisect_left(self.recent, oldest)]
        if len(self.recent) != wanted:
            self.recent = sorted(points[-wanted:])
        half = wanted // 2
        self.centre = self.recent[half] if wanted % 2 else (self.recent[half - 1] + self.recent[half]) / 2

    def add_excess(self, excess: float) -> None:
        """Record how far a point lay above the centre, whether it was accepted or not."""
        self.excesses.append(excess)
        insort(self.ranked, excess)
        if len(self.excesses) > WINDOW:
            del self.ranked[bisect_left(self.ranked, self.excesses[0])], self.excesses[0]

    def tail_noise(self) -> float:
        """Noise from the upper tail; 0 with fewer than 16 points."""
        if len(self.excesses) < 16:
            return 0.0
        return self.ranked[int(TAIL_QUANTILE * (len(self.ranked) - 1))] * TAIL_TO_SIGMA

    def cut(self, step: int) -> None:
        """Forget every point after `step`, because a rollback undid them."""
        keep = sum(seen <= step for seen in self.steps)
        del self.steps[keep:], self.points[keep:]
        self.recent = sorted(self.points[-min(RECENT, max(1, keep // 2)) :])
        self.centre = statistics.median(self.recent) if self.recent else math.nan

    def noise(self) -> float:
        """Robust standard deviation around the window's trend, in the unit of the points; NaN where unknown.

        This is the expensive call (20 us): callers ask for it only where `tail_noise` does not decide.
        """
        count = len(self.points)
        if count < 3:
            return math.nan
        values = np.array(self.points)
        x = np.arange(count) - (count - 1) / 2
        # Points near the largest float overflow; a non-finite result means that the noise is unknown.
        with np.errstate(all="ignore"):
            residuals = values - values.mean() - x * (x @ values) / (x @ x)
            return MAD_TO_SIGMA * _median(np.abs(residuals - _median(residuals)))


def _median(values: np.ndarray[Any, Any]) -> float:
    half = len(values) // 2
    values = np.sort(values)
    return float(values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2)
