"""A rank's messages to its agent (hello, layout, and all later ones), and the agent's verified replies."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fp8watch.records import CheckpointRecord, Command, Hello, Layout, LedgerUpdate, Reply
from fp8watch.security import Verifier
from fp8watch.training.guard import Guard
from fp8watch.transport import places
from fp8watch.transport.channel import Channel
from fp8watch.transport.pending import Outgoing

logger = logging.getLogger(__name__)


class Uplink:
    """A `Channel` and the layout sent last. Nothing here raises; only `await_agent` and `close` wait."""

    def __init__(
        self,
        channel: Channel,
        guard: Guard,
        checkpoints: Callable[[], list[CheckpointRecord]],
        verifier: Verifier | None = None,
    ) -> None:
        self._channel = channel
        self._guard = guard
        self._checkpoints = checkpoints
        self._verifier = verifier or Verifier(None)
        self._layout: Layout | None = None

    def open(self, hello: Hello, layout: Layout) -> None:
        """Start connecting. Each connection opens with hello, layout and checkpoints (`fp8watch.transport.opening`)."""
        self._layout = layout
        self._guard.call("transport preamble", self._channel.set_preamble, [hello, layout, *self._checkpoints()])

    def await_agent(self, timeout_seconds: float) -> bool:
        """Wait until the agent is connected; False if it is not within `timeout_seconds`."""
        return bool(self._guard.call("transport start", self._channel.await_agent, timeout_seconds))

    def introduce(self, hello: Hello, layout: Layout) -> None:
        """Send hello and layout again, for a new attempt or a changed hello."""
        self._layout = layout
        self.send(hello)
        self.send(layout)

    def announce(self, layout: Layout) -> None:
        """Send a layout unless it is the one sent last."""
        if layout is not self._layout:
            self._layout = layout
            self.send(layout)

    def send(self, message: Outgoing) -> None:
        """Queue a message. The channel counts what a full queue drops."""
        self._guard.call("transport send", self._channel.send, message)

    def count_dropped(self, reason: str, count: int) -> None:
        """Count frames that were dropped before they reached the queue."""
        if count > 0:
            self._guard.call("transport drops", self._channel.count_dropped, reason, count)

    @property
    def has_news(self) -> bool:
        """Whether there are replies to `take` or notes to log."""
        return self._channel.has_news

    def take(self) -> list[Reply]:
        """Replies since the last call. Commands and ledger updates without the controller's signature are dropped. They
        are not answered, so that they cannot block a genuine command with the same number."""
        replies = self._guard.call("transport take", self._channel.take) or []
        return [reply for reply in replies if self._guard.call("signature", self._is_genuine, reply)]

    def _is_genuine(self, reply: Reply) -> bool:
        if isinstance(reply, Command):
            is_genuine = self._verifier.command(reply)
        elif isinstance(reply, LedgerUpdate):
            is_genuine = self._verifier.ledger(reply)
        else:
            return True
        if is_genuine and isinstance(reply, LedgerUpdate) and not self._verifier.is_news(reply):
            logger.info(
                "fp8watch: checkpoint %s: label %s ignored, a later one has been applied", reply.checkpoint, reply.label
            )
            return False
        if not is_genuine:
            self._channel.count_dropped("forged")
            if self._verifier.refused == 1:
                logger.warning("fp8watch: %s without the controller's signature was refused", type(reply).__name__)
        return is_genuine

    def say_notes(self, *, is_unwritable_known: bool = False) -> None:
        """Log the transport's notes (a restarted process, an absent agent).

        `is_unwritable_known`: this rank has warned already that FP8WATCH_DIR cannot be written, so the agent's note
        about it is logged as INFO only.
        """
        for note in self._guard.call("transport notes", self._channel.notes) or []:
            is_known = is_unwritable_known and note.startswith(places.UNWRITABLE)
            logger.log(logging.INFO if is_known else logging.WARNING, "fp8watch: %s", note)

    def close(self, timeout_seconds: float) -> None:
        """Send what is queued, waiting at most `timeout_seconds`, and close."""
        self._guard.call("transport close", self._channel.close, timeout_seconds)
