"""Runs that this controller has set aside because processing them failed, each to be tried again after a while.

One run that cannot be processed must not stop the others, or come back with each restart: what was read of it is
acknowledged, and it goes on from its last memory; after another failure without that memory too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_SECONDS = 5.0
MAX_SECONDS = 300.0
MAX_REST_SECONDS = 30.0


@dataclass(slots=True)
class SetAsideRuns:
    """`clock` is monotonic, in seconds."""

    clock: Callable[[], float]
    times: Counter[str] = field(default_factory=Counter)
    """Run -> how often it was set aside."""
    _in_a_row: Counter[str] = field(default_factory=Counter)
    _until: dict[str, float] = field(default_factory=dict)
    _rests: dict[str, float] = field(default_factory=dict)

    def set_aside(self, run: str) -> float:
        """Set a run aside. Returns for how many seconds: longer each time."""
        now = self.clock()
        if now - self._until.get(run, now) > MAX_SECONDS:  # it has been well since
            self._in_a_row[run] = 0
        self.times[run] += 1
        self._in_a_row[run] += 1
        seconds = min(FIRST_SECONDS * 2.0 ** min(self._in_a_row[run] - 1, 16), MAX_SECONDS)
        self._until[run] = now + seconds
        return seconds

    def look_later(self, run: str) -> None:
        """An agent says it has ranks of a run that is over, and nothing that counts is heard of them: no need to look
        again at once."""
        now = self.clock()
        is_again = now - self._until.get(run, 0.0) < 2 * MAX_REST_SECONDS
        self._rests[run] = min(2 * self._rests.get(run, 0.5), MAX_REST_SECONDS) if is_again else 1.0
        self._until[run] = now + self._rests[run]

    def is_due(self, run: str) -> bool:
        """Whether a run is not set aside, or no longer."""
        return self.clock() >= self._until.get(run, 0.0)

    def may_use_memory(self, run: str) -> bool:
        """Whether its last memory may be used: it is not to blame for a second failure."""
        return self._in_a_row[run] < 2

    def over(self, run: str) -> None:
        """A run is over: its name begins anew."""
        for kept in (self._until, self._rests, self._in_a_row, self.times):
            kept.pop(run, None)
