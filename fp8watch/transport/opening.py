"""What a connection opens with, so that the agent understands the message that follows: hello, layout, checkpoints.

That is not the current state of training: frames that wait for an agent to start (or to come back) may be of an earlier
step, of an earlier layout, or of an attempt that a rollback has since ended. An opening ahead of them would make the
agent drop them as old, or leave their columns without names. So the opening is kept where the head of the queue is, and
moves on as each message is sent completely.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fp8watch.records import CheckpointRecord, Hello, Layout, Message, StepFrame

MAX_REMOVED = 256
"""Checkpoints removed by rotation that an agent is still told of, because it may have missed the removal."""


class Opening:
    """Made from a rank's first messages; the transport thread advances it with every message it has sent since."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._hello: Hello | None = None
        self._layout: Layout | None = None
        self._checkpoints: dict[str, CheckpointRecord] = {}
        self._others: list[Message] = []
        for message in messages:
            if not self._keep(message):
                self._others.append(message)

    def messages(self) -> list[Message]:
        """The opening for the next message; its hello says after how many updates that begins."""
        parts = [self._hello, self._layout, *self._others, *self._checkpoints.values()]
        return [part for part in parts if part is not None]

    def passed(self, message: Message) -> None:
        """A message was sent completely, and what follows comes after it."""
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
                # Sent in the middle of an attempt, perhaps with frames of earlier steps still on their way.
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
