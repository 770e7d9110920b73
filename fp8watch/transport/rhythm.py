"""When the transport thread looks into the queue for frames: once a step, about when the next step is due.

The queue is polled, because the training thread would have to release the GIL for a system call that wakes another
thread (`fp8watch.transport.bell`). But each look takes the GIL from it, too, and on a launch-bound model that time is
the step's: so a thread that looks 50 times a second takes more of it than all that it sends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LEAST_SECONDS = 0.02
"""Between two looks, and about how long a frame waits that was expected."""
MOST_SECONDS = 0.25
"""How long a frame waits at most that was not, where a step takes longer than that; else about a step."""
OVERDUE_SHARE = 0.25
"""Of the time by which a step is late, until the next look: training is evaluating, or has stopped."""
RECENT = 5
"""Steps whose median duration is expected of the next one: an evaluation or a checkpoint between two is not a step."""


class Rhythm:
    """Knows how long steps take from the times that their frames bear."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken_at = clock()
        self._made_at: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        """Durations of steps."""
        self._step_seconds: float | None = None

    def took(self, made_at: float) -> None:
        """A frame was taken from the queue; `made_at`: unix time in seconds at which its step ended."""
        self._taken_at = self._clock()
        before, self._made_at = self._made_at, made_at
        if before is not None and made_at > before:  # else the clock was set back
            self._recent.append(made_at - before)
            self._step_seconds = sorted(self._recent)[len(self._recent) // 2]

    def seconds(self) -> float:
        """How long to wait before the next look."""
        if self._step_seconds is None:
            return LEAST_SECONDS
        # A bit early: else what was taken late once would be taken late always.
        left = self._taken_at + self._step_seconds - LEAST_SECONDS / 2 - self._clock()
        wanted = left if left > 0 else min(OVERDUE_SHARE * -left, self._step_seconds)
        return min(max(wanted, LEAST_SECONDS), MOST_SECONDS)
