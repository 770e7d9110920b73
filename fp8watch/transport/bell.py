"""Wakes the transport thread while it waits for its socket.

Ringing is a system call, for which the training thread releases the GIL. So it is for what is rare and waited for: the
answer to a command, a checkpoint, evaluation scores, the end. Frames, which every step makes, are looked for instead
(`fp8watch.transport.rhythm`).
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

READ_BYTES = 4096


class Bell:
    """A pipe to oneself, for `select.poll`."""

    def __init__(self) -> None:
        """Raises `OSError` when the process has no file descriptor left."""
        self._inside, self._button = ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        # Not before: the number of a closed descriptor may be that of another file when somebody rings.
        weakref.finalize(self, _close, ends).atexit = False

    def fileno(self) -> int:
        """Can be read from `ring` to `quieten`."""
        return self._inside

    def ring(self) -> None:
        """Wake the thread that waits, or that waits next. From any thread; does not block."""
        with suppress(BlockingIOError):  # full: rung often enough
            os.write(self._button, b"\0")

    def quieten(self) -> None:
        """Called by the thread that has woken up, before it looks for what it was woken for."""
        with suppress(BlockingIOError):
            os.read(self._inside, READ_BYTES)


def _close(ends: tuple[int, int]) -> None:
    for end in ends:
        os.close(end)
