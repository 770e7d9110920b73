"""Which layers deserve series of their own: the K whose numbers are worst, changed sparingly.

Worst is least head-room within the last minute (it clipped, or nearly), or far too much of it now (small
values underflow). A layer that is chosen stays for at least 15 s, because every
change of the set starts and ends series.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROOMY_LOG2 = 8.0
"""Head-room above which too much of the format's range lies unused."""
RESELECT_SECONDS = 15.0

Floats = npt.NDArray[np.float32]


class WorstLayers:
    """Keeps the chosen modules of one run."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._chosen: list[str] = []
        self._chosen_at = -np.inf

    def select(self, now: float, modules: list[str], headroom: Floats, headroom_min: Floats) -> list[str]:
        """The chosen modules, worst first at the time of the choice; arrays have one element a tensor."""
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
