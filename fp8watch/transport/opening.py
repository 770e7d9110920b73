"""The messages that open each connection (hello, layout, checkpoints), which the agent needs to read later messages.

They must match the message at the head of the queue, not the current state of training. Queued frames may be of an
earlier step, of an earlier layout, or of an attempt that a rollback has since ended. A newer opening would make the
agent drop them as old, or leave their columns without names. So the opening is updated as each message is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fp8watch.records import CheckpointRecord, Hello, Layout, Message, StepFrame

MAX_REMOVED = 256
"""Removed checkpoints that are still sent to an agent, because it may have missed the removal."""


class Opening:
    """Starts with a rank's first messages; the transport thread updates it with every message that it has sent."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._hello: Hello | None = None
        self._layout: Layout | None = None
        self._checkpoints: dict[str, CheckpointRecord] = {}
        self._others: list[Message] = []
        for message in messages:
            if not self._keep(message):
                self._others.append(message)

    def messages(self) -> list[Message]:
        """The opening before the next message. Its hello has the step after which that message follows."""
        parts = [self._hello, self._layout, *self._others, *self._checkpoints.values()]
        return [part for part in parts if part is not None]

    def passed(self, message: Message) -> None:
        """Called when a message was sent completely."""
        if isinstance(message, StepFrame):
            hello = self._hello
            if hello is not None and hello.attempt == message.attempt and hello.step < message.step:
                self._hello = msgspec.structs.replace(hello, step=message.step)
        else:
            self._keep(message)

    def _keep(self, message: Message) -> bool:
        if isinstance(message, Hello):
            known = self._hello
            if known is not None and known.attempt == message.attempt:
                # Sent during an attempt; frames of earlier steps may still be queued.
                message = msgspec.structs.replace(message, step=known.step)
            self._hello = message
        elif isinstance(message, Layout):
            self._layout = message
        elif isinstance(message, CheckpointRecord):
            self._checkpoints[message.checkpoint] = message
            removed = [name for name, record in self._checkpoints.items() if not record.path]
            for name in removed[: max(0, len(removed) - MAX_REMOVED)]:
                del self._checkpoints[name]
        else:
            return False
        return True
