"""When the transport thread looks into the queue: once a step, about when the next step is due.

The queue is polled, because the training thread would have to release the GIL for a system call that wakes another
thread. But each look takes the GIL from it, too, and on a launch-bound model that time is the step's: so a thread that
looks 50 times a second takes more of it than all that it sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_SECONDS = 0.02
"""Between two looks, and about how long a message waits when it was expected."""
MOST_SECONDS = 0.25
"""How long a message waits at most that was not."""
OVERDUE_SHARE = 0.25
"""Of the time by which a step is late, until the next look: training is evaluating, or has stopped."""
SMOOTHING = 0.2
"""Weight of the newest step in the mean duration."""


class Rhythm:
    """Knows how long steps take from the times that their frames bear."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken_at = clock()
        self._made_at: float | None = None
        self._step_seconds: float | None = None

    def took(self, made_at: float) -> None:
        """A frame was taken from the queue; `made_at`: unix time in seconds at which its step ended."""
        self._taken_at = self._clock()
        before, self._made_at = self._made_at, made_at
        if before is None or made_at <= before:  # a clock that was set back
            return
        seconds, known = made_at - before, self._step_seconds
        if known is None:
            self._step_seconds = seconds
        else:
            # An evaluation or a checkpoint between two steps is not a step.
            self._step_seconds = known + SMOOTHING * (min(seconds, 2.0 * known) - known)

    def seconds(self) -> float:
        """How long to wait before the next look."""
        if self._step_seconds is None:
            return LEAST_SECONDS
        # A bit early: else what was taken late once would be taken late always.
        left = self._taken_at + self._step_seconds - LEAST_SECONDS / 2 - self._clock()
        wanted = left if left > 0 else OVERDUE_SHARE * -left
        return min(max(wanted, LEAST_SECONDS), MOST_SECONDS)
