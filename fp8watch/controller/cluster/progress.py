"""The state of processing one run's entries."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from fp8watch.controller.cluster.inflow import Entered

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 120.0


@dataclass(slots=True)
class Progress:
    """Of one run. What is in it is known from Redis too, in case this process dies."""

    open_frames: deque[tuple[tuple[int, int], Entered]] = field(default_factory=deque)
    """((attempt, step), entry without its message) of frames whose step is not complete yet."""
    done: list[str] = field(default_factory=list)
    """Ids of the entries that the next commit acknowledges."""
    remembered_at: float = 0.0
    memory_bytes: int = 0
    is_dirty: bool = False
    missing: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    """How often it was asked whether the run is over."""
    has_heard: bool = False
    """Whether anything was taken in since this controller joined the run."""
    _in_vain: int = 0
    _catch_up_at: float = 0.0
    _catch_up_pause: float = FIRST_PAUSE_SECONDS

    def finish(self, entry_id: str) -> None:
        """The next commit acknowledges this entry; one without an id was none of the stream."""
        if entry_id:
            self.done.append(entry_id)

    def may_catch_up(self, now: float, *, needs_catch_up: bool) -> bool:
        """Whether to look for what the stream does not have. `now`: by a monotonic clock."""
        return needs_catch_up and now >= self._catch_up_at

    def caught_up(self, now: float, *, has_found: bool) -> int:
        """It was looked for: next time later, as long as nothing is found. Returns how often it was not, in a row."""
        self._in_vain = 0 if has_found else self._in_vain + 1
        self._catch_up_pause = FIRST_PAUSE_SECONDS if has_found else min(2 * self._catch_up_pause, MAX_PAUSE_SECONDS)
        self._catch_up_at = now + self._catch_up_pause
        return self._in_vain

    def settle(self, closed: tuple[int, int] | None) -> None:
        """Frames up to this attempt and step are done; None: the run is not known here, so all are."""
        still_open: deque[tuple[tuple[int, int], Entered]] = deque()
        for position, entry in self.open_frames:
            if closed is None or position <= closed:
                self.done.append(entry.entry_id)
            else:
                still_open.append((position, entry))
        self.open_frames = still_open

    def unfinished(self) -> list[tuple[str, int, int]]:
        """(sender, incarnation, sequence) of the entries whose effect is not in the memory yet."""
        return [(entry.node, *entry.number) for _, entry in self.open_frames]

    def read(self) -> list[str]:
        """Ids of all entries that were read and not acknowledged."""
        return [*self.done, *(entry.entry_id for _, entry in self.open_frames)]
