"""Finds the Redis stream entries that are older than the retention time, independent of changes to the clocks.

Entry IDs contain the time of Redis's clock. If that clock is set forward, every entry looks old; if it is set back, no
entry gets old until it has caught up. So age is measured with this process's monotonic clock, from the IDs of the
entries that it has sent. Until the process has run for the retention time, Redis's clock is used, but entries sent by
this process are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

EVERY_SECONDS = 10.0
Id = tuple[int, int]


class Ages:
    """The ages of one run's stream. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, Id]] = deque()
        """(time sent, entry ID), one per `EVERY_SECONDS`, oldest first."""

    def sent(self, name: str) -> None:
        """Redis has added an entry with this ID, such as `1700000000000-3`."""
        now, given = self._clock(), parse(name)
        if self._marks and given < self._marks[-1][1]:
            self._marks.clear()  # a new stream of the same name: Redis has lost the old one
        if not self._marks or now - self._marks[-1][0] >= EVERY_SECONDS:
            self._marks.append((now, given))

    def oldest_kept(self, keep_seconds: float, redis_seconds: float) -> str:
        """The ID before which all entries are older than `keep_seconds`. `redis_seconds`: Unix time of Redis's
        clock."""
        now = self._clock()
        old = [name for at, name in self._marks if now - at >= keep_seconds]
        if old:
            while len(self._marks) > 1 and self._marks[1][1] <= old[-1]:
                self._marks.popleft()
            return shown(old[-1])
        by_redis = (max(0, int((redis_seconds - keep_seconds) * 1000)), 0)
        return shown(min(by_redis, self._marks[0][1]) if self._marks else by_redis)


def parse(name: str) -> Id:
    """Milliseconds and sequence number of an entry ID."""
    milliseconds, _, number = name.partition("-")
    return int(milliseconds), int(number or 0)


def shown(name: Id) -> str:
    """The ID as Redis writes it."""
    return f"{name[0]}-{name[1]}"
