"""When a rank counts as lost and when the process has nothing left to do. Pure: times are handed in.

A rank that said goodbye is gone at once. One whose socket just closed may come back within half of the grace
time; after that it is lost, which leaves the other half to record the end. An embedded process is over when no
rank is connected or awaited, or when nobody ever came.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RankKey = tuple[str, int]
"""Run and rank."""


@dataclass(slots=True)
class Lifecycle:
    """Times are seconds of one monotonic clock."""

    is_embedded: bool
    started: float
    connect_seconds: float
    end_grace_seconds: float
    _connected: set[RankKey] = field(default_factory=set)
    _awaited: dict[RankKey, float] = field(default_factory=dict)
    _has_said_goodbye: set[RankKey] = field(default_factory=set)
    _has_served: bool = False

    @property
    def num_connected(self) -> int:
        """Ranks that are connected now."""
        return len(self._connected)

    def connected(self, key: RankKey) -> None:
        """A rank has said hello, for the first time or again."""
        self._has_served = True
        self._connected.add(key)
        self._awaited.pop(key, None)
        self._has_said_goodbye.discard(key)

    def goodbye(self, key: RankKey) -> None:
        """A rank leaves of its own will; its socket closes next."""
        self._has_said_goodbye.add(key)

    def closed(self, key: RankKey, now: float) -> bool:
        """A rank's socket has closed; True when the rank is gone for good, of its own will."""
        self._connected.discard(key)
        if key in self._has_said_goodbye:
            return True
        self._awaited[key] = now + self.end_grace_seconds / 2
        return False

    def newly_lost(self, now: float) -> list[RankKey]:
        """Ranks that did not come back in time, each once."""
        lost = [key for key, until in self._awaited.items() if now >= until]
        for key in lost:
            del self._awaited[key]
        return lost

    def is_run_over(self, run: str) -> bool:
        """Whether no rank of `run` is connected or awaited."""
        return not any(key[0] == run for key in (*self._connected, *self._awaited))

    def is_over(self, now: float, *, is_parent_gone: bool = False) -> bool:
        """Whether the process should end."""
        if not self.is_embedded or self._connected or self._awaited:
            return False
        return self._has_served or is_parent_gone or now - self.started > self.connect_seconds
