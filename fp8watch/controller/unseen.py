"""Frames that no detector sees, counted by reason and logged; and how long a step waits for frames still on their way.

`missing`: lost on the way (a later frame of the rank arrived, or the process that held it died); `late`: its step was
judged without it; `superseded`: of an attempt that another rank has left; `unannounced`: of an attempt without a hello;
`detectors_failed`: the detectors as a whole raised an exception (one that fails alone is a `blind` finding).
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from fp8watch.records import Hello, StepFrame

logger = logging.getLogger(__name__)
WAIT_SECONDS = 5.0
"""How long a step may wait for frames of a rank that is behind, or that has never been heard of."""


def is_due(now: float, last: float, seconds: float) -> bool:
    """Whether something is due again. A clock that was set back must not put it off until it has caught up."""
    return not 0.0 <= now - last < seconds


class Unseen:
    """Counts of all runs. `listener` is called with (run, reason, count)."""

    def __init__(self, listener: Callable[[str, str, int], None] | None = None) -> None:
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Run -> reason -> frames."""
        self._listener = listener

    def add(self, run: str, reason: str, count: int) -> None:
        """Add to the count of a reason; the first time is logged."""
        if count <= 0:
            return
        if not self.counts[run][reason]:
            logger.warning("run %s: frames that no detector sees (%s), counted from now on", run, reason)
        self.counts[run][reason] += count
        if self._listener is not None:
            self._listener(run, reason, count)


class StepWait:
    """Which step of a run is waiting for ranks, and since when."""

    def __init__(self) -> None:
        self._held: tuple[int, int, float] | None = None

    def has_ended(self, attempt: int, step: int | None, now: float) -> bool:
        """Whether the step has waited long enough; `step` None: nothing waits. `now`: seconds of any one clock."""
        if step is None:
            self._held = None
        elif self._held is None or self._held[:2] != (attempt, step):
            self._held = (attempt, step, now)
        elif is_due(now, self._held[2], WAIT_SECONDS):
            self._held = None
            return True
        return False


class Predecessor:
    """What the previous process stored of each rank: frames that a rank has sent beyond that died with it."""

    def __init__(self, frames: Iterable[StepFrame] = ()) -> None:
        self._newest: dict[int, tuple[int, int]] = {}
        for frame in frames:
            self._newest[frame.rank] = max(self._newest.get(frame.rank, (0, 0)), (frame.attempt, frame.step))

    def lost(self, hello: Hello) -> int:
        """Frames of a rank that were sent but not stored; reported once, at its first hello to this process."""
        attempt, step = self._newest.pop(hello.rank, (hello.attempt, hello.step))
        return max(0, hello.step - step) if attempt == hello.attempt else 0
