"""A step's frame that still has to be put together by whoever needs it first, usually the transport thread.

Its numbers are on the host and nobody writes to them any more, so any thread may do it; two threads at once make equal
frames. This keeps the work off the training thread.
"""

from __future__ import annotations

from typing import Protocol

from fp8watch.records import Message, StepFrame


class Parts(Protocol):
    """What a frame is put together from."""

    @property
    def step(self) -> int:
        """The optimizer step."""

    def frame(self) -> StepFrame:
        """The complete frame."""

    def scalars(self) -> dict[str, float]:
        """The frame's scalars alone, which is much less work."""


class PendingFrame:
    """Made by the recorder; queued instead of the message that it becomes."""

    __slots__ = ("_frame", "_parts", "step")

    def __init__(self, parts: Parts) -> None:
        self.step = parts.step
        self._parts: Parts | None = parts
        self._frame: StepFrame | None = None

    def frame(self) -> StepFrame:
        """The frame, put together at the first call (by both of two threads at once). Raises what that raises."""
        parts, found = self._parts, self._frame  # in this order: the frame is set before the parts are released
        if found is None:
            assert parts is not None
            found = self._frame = parts.frame()
            self._parts = None
        return found

    def scalars(self) -> dict[str, float]:
        """The frame's scalars, whether or not it has been put together."""
        parts, found = self._parts, self._frame
        if found is not None:
            return found.scalars
        assert parts is not None
        return parts.scalars()


Outgoing = Message | PendingFrame
"""What training hands to the transport."""


def as_message(outgoing: Outgoing) -> Message:
    """The message to send. Raises what putting a frame together raises."""
    return outgoing.frame() if isinstance(outgoing, PendingFrame) else outgoing
