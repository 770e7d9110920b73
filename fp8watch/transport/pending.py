"""A step's frame that has still to be put together: by whoever needs it first, as a rule the transport thread.

Its numbers are on the host and nobody writes to them any more, so that any thread may do it, and two at once come to
the same. The training thread has other things to do.
"""

from __future__ import annotations

from typing import Protocol

from fp8watch.records import Message, StepFrame


class Parts(Protocol):
    """What a frame is made of."""

    @property
    def step(self) -> int:
        """The optimizer step."""

    def frame(self) -> StepFrame:
        """Put together whole."""

    def scalars(self) -> dict[str, float]:
        """Its scalars alone: much less work."""


class PendingFrame:
    """Made by the recorder; queued like the message that it becomes."""

    __slots__ = ("_frame", "_parts", "step")

    def __init__(self, parts: Parts) -> None:
        self.step = parts.step
        self._parts: Parts | None = parts
        self._frame: StepFrame | None = None

    def frame(self) -> StepFrame:
        """The frame, made at the first call (of two threads at once, by both). Raises what its making raises."""
        parts, found = self._parts, self._frame  # in this order: the frame is there before its parts are let go
        if found is None:
            assert parts is not None
            found = self._frame = parts.frame()
            self._parts = None
        return found

    def scalars(self) -> dict[str, float]:
        """Those of the frame, whether or not it has been put together."""
        parts, found = self._parts, self._frame
        if found is not None:
            return found.scalars
        assert parts is not None
        return parts.scalars()


Outgoing = Message | PendingFrame
"""What training hands to the transport."""


def as_message(outgoing: Outgoing) -> Message:
    """As it goes out. Raises what the making of a frame raises."""
    return outgoing.frame() if isinstance(outgoing, PendingFrame) else outgoing
