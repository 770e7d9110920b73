"""What is older than the time that frames are kept goes out of the stream, by a clock that nobody can set.

Entries are named by the clock of Redis' machine. If that is set forward, everything would seem old; if it is set back,
nothing would become old until it has caught up. So age is told by this process's monotonic clock and the names that
Redis gave to what it sent. Only a process that has not run for so long yet goes by Redis' clock, and then never beyond
what it has sent itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

EVERY_SECONDS = 10.0
Id = tuple[int, int]


class Ages:
    """Of one run's stream. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, Id]] = deque()
        """(when it was sent, name), one in `EVERY_SECONDS`, oldest first."""

    def sent(self, name: str) -> None:
        """Redis took an entry under this name, e.g. `1700000000000-3`."""
        now, given = self._clock(), parse(name)
        if self._marks and given < self._marks[-1][1]:
            self._marks.clear()  # another stream of the same name: Redis has lost the first
        if not self._marks or now - self._marks[-1][0] >= EVERY_SECONDS:
            self._marks.append((now, given))

    def oldest_kept(self, keep_seconds: float, redis_seconds: float) -> str:
        """Everything before this name is older than `keep_seconds`; `redis_seconds`: Unix time by Redis' clock."""
        now = self._clock()
        old = [name for at, name in self._marks if now - at >= keep_seconds]
        if old:
            while len(self._marks) > 1 and self._marks[1][1] <= old[-1]:
                self._marks.popleft()
            return shown(old[-1])
        by_redis = (max(0, int((redis_seconds - keep_seconds) * 1000)), 0)
        return shown(min(by_redis, self._marks[0][1]) if self._marks else by_redis)


def parse(name: str) -> Id:
    """Milliseconds and number of an entry's name."""
    milliseconds, _, number = name.partition("-")
    return int(milliseconds), int(number or 0)


def shown(name: Id) -> str:
    """As Redis writes it."""
    return f"{name[0]}-{name[1]}"
