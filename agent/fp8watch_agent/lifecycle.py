"""Decides when a rank is lost and when the process should exit. Pure: the caller passes the time.

A rank is gone after a goodbye. A rank whose socket closed without one may reconnect within half of the grace time.
After that it is lost, and the other half is left for recording the end. An embedded process is over when it has served
a rank and none is connected or expected back, or when no rank ever came.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RankKey = tuple[str, int]
"""Run and rank."""


@dataclass(slots=True)
class Lifecycle:
    """All times are in seconds of the same monotonic clock."""

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
        """Number of ranks connected now."""
        return len(self._connected)

    def connected(self, key: RankKey) -> None:
        """A rank has said hello, for the first time or again."""
        self._has_served = True
        self._connected.add(key)
        self._awaited.pop(key, None)
        self._has_said_goodbye.discard(key)

    def goodbye(self, key: RankKey) -> None:
        """A rank has said goodbye; its socket closes next."""
        self._has_said_goodbye.add(key)

    def closed(self, key: RankKey, now: float) -> bool:
        """A rank's socket has closed. True when it had said goodbye and will not come back."""
        self._connected.discard(key)
        if key in self._has_said_goodbye:
            return True
        self._awaited[key] = now + self.end_grace_seconds / 2
        return False

    def newly_lost(self, now: float) -> list[RankKey]:
        """Ranks that did not reconnect in time. Each is returned once."""
        lost = [key for key, until in self._awaited.items() if now >= until]
        for key in lost:
            del self._awaited[key]
        return lost

    def is_run_over(self, run: str) -> bool:
        """Whether no rank of `run` is connected or expected back."""
        return not any(key[0] == run for key in (*self._connected, *self._awaited))

    def is_over(self, now: float, *, is_parent_gone: bool = False) -> bool:
        """Whether the process should exit."""
        if not self.is_embedded or self._connected or self._awaited:
            return False
        return self._has_served or is_parent_gone or now - self.started > self.connect_seconds
