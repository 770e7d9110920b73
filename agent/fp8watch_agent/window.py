"""The extreme of every tensor over the last 60 seconds, whatever the scrape interval.

There is one slot per second for 61 seconds, so the result covers 60 to 61 seconds. Reading changes nothing, so that
several Prometheus servers see the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WINDOW_SECONDS = 60
_SLOTS = WINDOW_SECONDS + 1

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.intp]


class SlidingExtreme:
    """Maximum or minimum of each of `size` series over the window."""

    def __init__(self, *, is_maximum: bool, size: int = 0) -> None:
        self._fill = np.float32(-np.inf if is_maximum else np.inf)
        self._pick: np.ufunc = np.maximum if is_maximum else np.minimum
        self._seconds = np.full(_SLOTS, -1, dtype=np.int64)
        self._values: Floats = np.full((_SLOTS, size), self._fill, dtype=np.float32)

    def grow(self, size: int) -> None:
        """Add series at the end."""
        missing = size - self._values.shape[1]
        if missing > 0:
            self._values = np.pad(self._values, ((0, 0), (0, missing)), constant_values=self._fill)

    def update(self, now: float, rows: Rows, values: Floats) -> None:
        """Add finite float32 `values` of the series `rows` (unique). `now`: seconds of a monotonic clock."""
        second = int(now)
        slot = second % _SLOTS
        if self._seconds[slot] != second:
            self._seconds[slot] = second
            self._values[slot] = self._fill
        self._values[slot, rows] = self._pick(self._values[slot, rows], values)

    def read(self, now: float) -> Floats:
        """The extreme of every series; NaN where the window has no value."""
        is_live = (self._seconds > int(now) - _SLOTS) & (self._seconds >= 0)
        if not is_live.any():
            return np.full(self._values.shape[1], np.nan, dtype=np.float32)
        extreme: Floats = self._pick.reduce(self._values[is_live], axis=0)
        return np.where(np.isfinite(extreme), extreme, np.float32(np.nan))
