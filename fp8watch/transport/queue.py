"""The send queue: two deques, filled by the training thread and emptied by the transport thread.

`deque.append` and `popleft` are atomic, so there is no lock that the training thread could wait for. Frames are
bounded, and the oldest is dropped first. All other messages (results, checkpoints, layouts, hello, goodbye) have their
own deque, so that a burst of frames never pushes them out. The order of `put` is kept across both deques.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque

from fp8watch.records import StepFrame
from fp8watch.transport.pending import Outgoing, PendingFrame

MAX_KEPT = 4096
"""Most queued messages other than frames. A run sends a handful per hundred steps."""

_Entry = tuple[int, Outgoing]


class OutgoingQueue:
    """A bounded queue with one producer and one consumer."""

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._frames: deque[_Entry] = deque()
        self._kept: deque[_Entry] = deque()
        self._sequence = itertools.count()
        self._next_frame: _Entry | None = None
        self._next_kept: _Entry | None = None
        self.overflowed: Counter[str] = Counter()
        """Number of dropped messages, by the reason given to `put`; written by the producer only."""

    def put(self, message: Outgoing, reason_when_full: str) -> bool:
        """Add a message. When there is no room, the oldest of its kind is dropped and counted. Returns whether it is a
        frame. Producer side."""
        is_frame = type(message) is PendingFrame or type(message) is StepFrame
        queue, limit = (self._frames, self._max_frames) if is_frame else (self._kept, MAX_KEPT)
        queue.append((next(self._sequence), message))
        while len(queue) > limit:
            try:
                queue.popleft()
            except IndexError:  # the consumer was quicker, so there is room now
                break
            self.overflowed[reason_when_full] += 1
        return is_frame

    def take(self) -> Outgoing | None:
        """The oldest message, None when there is none. Consumer side."""
        # Both heads are removed before they are compared; otherwise the producer could drop them in between.
        if self._next_frame is None:
            self._next_frame = _popleft(self._frames)
        if self._next_kept is None:
            self._next_kept = _popleft(self._kept)
        frame, kept = self._next_frame, self._next_kept
        if frame is None and kept is None:
            return None
        if kept is None or (frame is not None and frame[0] < kept[0]):
            assert frame is not None
            self._next_frame = None
            return frame[1]
        self._next_kept = None
        return kept[1]

    def __len__(self) -> int:
        return len(self._frames) + len(self._kept) + (self._next_frame is not None) + (self._next_kept is not None)


def _popleft(queue: deque[_Entry]) -> _Entry | None:
    try:
        return queue.popleft()
    except IndexError:
        return None
