"""Selects the K worst layers, which get their own series.

A layer is bad if it had little head-room in the last minute (it clipped, or almost did) or has far too much now (small
values underflow). A complete selection is kept for 15 s, because each change ends series and starts others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROOMY_LOG2 = 8.0
"""Head-room above which too much of the format's range is unused."""
RESELECT_SECONDS = 15.0

Floats = npt.NDArray[np.float32]


class WorstLayers:
    """The selected modules of one run."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._chosen: list[str] = []
        self._chosen_at = -np.inf

    def select(self, now: float, modules: list[str], headroom: Floats, headroom_min: Floats) -> list[str]:
        """The selected modules, worst first at the time of selection. Arrays have one element per tensor."""
        if now - self._chosen_at < RESELECT_SECONDS and len(self._chosen) >= min(self._count, len(set(modules))):
            return self._chosen
        score: dict[str, float] = {}
        badness = np.fmax(-headroom_min, headroom - np.float32(ROOMY_LOG2))
        for module, value in zip(modules, badness, strict=True):
            bad = -np.inf if np.isnan(value) else float(value)
            score[module] = max(score.get(module, -np.inf), bad)
        if score and max(score.values()) > -np.inf:
            self._chosen = sorted(score, key=lambda module: -score[module])[: self._count]
            self._chosen_at = now
        return self._chosen
