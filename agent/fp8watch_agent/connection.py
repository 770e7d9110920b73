"""The connection of one rank: decodes its messages and counts, by reason, those that it drops.

The first message must be a hello, which binds the connection to a run and rank. A frame with an impossible length
closes the connection. A message that cannot be decoded is dropped, and reading continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from fp8watch import wire
from fp8watch.errors import WireError
from fp8watch.records import CheckpointRecord, Evaluation, Hello, Message, Reply, Welcome
from fp8watch_agent.lifecycle import RankKey

logger = logging.getLogger(__name__)
READ_BYTES = 256 * 1024
MAX_UNREAD_BYTES = 8 * 1024 * 1024
"""Bytes of replies that a rank may leave unread before its connection is closed."""


class Connection:
    """Calls `drop(run, reason)` for every message that it does not pass on."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drop: Callable[[str | None, str], None]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._drop = drop
        self._splitter = wire.Splitter()
        self.key: RankKey | None = None
        """Run and rank; None before the hello."""
        self.pid = 0
        """Process ID of the rank."""

    async def read(self) -> list[Message] | None:
        """Wait for data and return the messages in it; None at the end of the stream."""
        try:
            data = await self._reader.read(READ_BYTES)
        except (ConnectionError, OSError) as error:
            logger.debug("connection of %s broke: %s", self.key, error)
            return None
        if not data:
            return None
        # A read of buffered bytes does not yield to the event loop.
        await asyncio.sleep(0)
        messages: list[Message] = []
        try:
            messages.extend(message for body in self._splitter.feed(data) for message in self._decode(body))
        except WireError as error:
            logger.warning("connection of %s closed: %s", self.key, error)
            self._drop(self._run, "too_large")
            self.close()
        return messages

    def send(self, reply: Reply) -> None:
        """Queue a reply. A rank that does not read its replies is disconnected."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            logger.warning("rank %s does not read its replies; connection closed", self.key)
            self.close()
            return
        try:
            self._writer.write(wire.frame(reply))
        except WireError as error:
            logger.warning("reply to %s dropped: %s", self.key, error)

    def close(self, *, is_flushed: bool = False) -> None:
        """Close the connection. Unsent replies are lost unless `is_flushed`."""
        if is_flushed:
            self._writer.close()
        else:
            self._writer.transport.abort()

    @property
    def _run(self) -> str | None:
        return None if self.key is None else self.key[0]

    def _decode(self, body: bytes) -> Iterator[Message]:
        try:
            message = wire.unpack_message(body)
        except WireError as error:
            logger.debug("message of %s dropped: %s", self.key, error)
            self._drop(self._run, "malformed")
            return
        if isinstance(message, Hello):
            if message.wire_version not in wire.READABLE_VERSIONS:
                self._drop(message.run, "version")
                self._reject_version(message)
                return
            if self.key is not None and self.key != (message.run, message.rank):
                self._drop(self._run, "foreign")
                return
            self.key = (message.run, message.rank)
        elif self.key is None or not self._is_own(message):
            self._drop(self._run, "foreign")
            return
        yield message

    def _reject_version(self, hello: Hello) -> None:
        """Tell a rank with another wire version why it is not watched. It tries again, perhaps with a newer agent."""
        warning = (
            f"rank {hello.rank} of run {hello.run} speaks wire version {hello.wire_version}, this node's agent reads "
            f"{sorted(wire.READABLE_VERSIONS)}: it is not watched until one of them is upgraded"
        )
        logger.warning("%s", warning)
        self.send(Welcome(wire_version=wire.WIRE_VERSION, run=hello.run, term=0, warnings=[warning]))
        self.close(is_flushed=True)

    def _is_own(self, message: Message) -> bool:
        assert self.key is not None
        has_rank = not isinstance(message, CheckpointRecord | Evaluation)
        return message.run == self.key[0] and (not has_rank or message.rank == self.key[1])  # type: ignore[union-attr]
