"""A frame that is built on first use, usually by the transport thread, to keep the work off the training thread.

Its numbers are on the host and do not change any more, so any thread may build the frame. Two threads that do so at
once build equal frames.
"""

from __future__ import annotations

from typing import Protocol

from fp8watch.records import Message, StepFrame


class Parts(Protocol):
    """What a frame is built from."""

    def frame(self) -> StepFrame:
        """The complete frame."""

    def scalars(self) -> dict[str, float]:
        """The frame's scalars alone, which are much cheaper."""


class PendingFrame:
    """Made by the recorder and queued in place of its message."""

    __slots__ = ("_frame", "_parts", "step")

    def __init__(self, parts: Parts, step: int) -> None:
        """`step`: the optimizer step."""
        self.step = step
        self._parts: Parts | None = parts
        self._frame: StepFrame | None = None

    def frame(self) -> StepFrame:
        """The frame, built at the first call. Raises what building it raises."""
        parts, found = self._parts, self._frame  # in this order: the frame is set before the parts are released
        if found is None:
            assert parts is not None
            found = self._frame = parts.frame()
            self._parts = None
        return found

    def scalars(self) -> dict[str, float]:
        """The frame's scalars, whether or not the frame has been built."""
        parts, found = self._parts, self._frame
        if found is not None:
            return found.scalars
        assert parts is not None
        return parts.scalars()


Outgoing = Message | PendingFrame
"""What the training thread sends."""


def as_message(outgoing: Outgoing) -> Message:
    """The message to send. Raises what building a frame raises."""
    return outgoing.frame() if isinstance(outgoing, PendingFrame) else outgoing
