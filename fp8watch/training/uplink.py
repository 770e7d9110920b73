"""What a rank says of itself: the hello and layout that open every connection, and everything sent after them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from fp8watch.records import CheckpointRecord, Hello, Layout, Message, Reply
from fp8watch.training.guard import Guard
from fp8watch.transport.channel import Channel

logger = logging.getLogger(__name__)


class Uplink:
    """A channel with its preamble kept up to date. Nothing here waits or raises."""

    def __init__(self, channel: Channel, guard: Guard, checkpoints: Callable[[], list[CheckpointRecord]]) -> None:
        self._channel = channel
        self._guard = guard
        self._checkpoints = checkpoints
        self._hello: Hello | None = None
        self._layout: Layout | None = None

    def open(self, hello: Hello, layout: Layout) -> None:
        """The first connection may be made from now on."""
        self._hello, self._layout = hello, layout
        self._refresh()

    def introduce(self, hello: Hello, layout: Layout) -> None:
        """A new attempt, or something in the hello has changed: say it now and on later connections."""
        self.open(hello, layout)
        self.send(hello)
        self.send(layout)

    def announce(self, layout: Layout) -> None:
        """Send a layout if it is not the one announced last."""
        if layout is not self._layout:
            self._layout = layout
            self._refresh()
            self.send(layout)

    def reached(self, step: int) -> None:
        """Keep the step that a later connection opens with."""
        if self._hello is not None:
            self._hello = msgspec.structs.replace(self._hello, step=step)
            self._refresh()

    def _refresh(self) -> None:
        self._guard.call("transport preamble", self._set_preamble)

    def _set_preamble(self) -> None:
        if self._hello is not None and self._layout is not None:
            self._channel.set_preamble([self._hello, self._layout, *self._checkpoints()])

    def send(self, message: Message) -> None:
        """Queue a message; a full queue is counted by the channel."""
        self._guard.call("transport send", self._channel.send, message)

    def take(self) -> list[Reply]:
        """Replies since the last call."""
        return self._guard.call("transport take", self._channel.take) or []

    def say_notes(self) -> None:
        """Log what the transport has to say (a restarted process, an absent agent)."""
        for note in self._guard.call("transport notes", self._channel.notes) or []:
            logger.warning("fp8watch: %s", note)

    def close(self, timeout_seconds: float) -> None:
        """Send what is queued, within the time given."""
        self._guard.call("transport close", self._channel.close, timeout_seconds)
