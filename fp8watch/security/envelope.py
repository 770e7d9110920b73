"""Envelopes authenticate what an agent sends to the controller: sender, order and content.

The signature covers the sender's name, its incarnation, a sequence number and the body. So an entry cannot be repeated,
given to another sender, or replayed after a restart: `Opener` accepts each sender's numbers in increasing order only.
Gaps are allowed, because a lost entry is not a forged one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec

from fp8watch import wire
from fp8watch.errors import WireError
from fp8watch.security.keyring import KeyRing

MAX_SENDERS = 65_536
"""Maximum number of senders whose newest number is kept. Beyond it the one heard least recently is removed."""
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_NUMBERS = struct.Struct(">QQ")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A message with proof of its origin."""

    sender: Annotated[str, msgspec.Meta(max_length=256)]
    """Node name of the agent."""
    incarnation: Number
    """Number of the agent process: its start as Unix time in nanoseconds, or one more than its predecessor's if that is
    larger."""
    sequence: Number
    """Increases with every entry."""
    body: bytes
    signature: bytes = b""
    wire_version: Number = 1
    """Wire version of the body (the agent's `fp8watch.wire.WIRE_VERSION`)."""


_decoder = msgspec.msgpack.Decoder(Envelope)


def unpack(data: bytes) -> Envelope:
    """Decode an entry without checking its origin. Raises `WireError` for anything that is not an envelope."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # deep nesting in a field that is ignored
        raise WireError(str(error)) from error


def _covered(envelope: Envelope) -> bytes:
    sender = envelope.sender.encode()
    head = struct.pack(">H", len(sender)) + sender + _NUMBERS.pack(envelope.incarnation, envelope.sequence)
    return b"fp8watch envelope %d " % envelope.wire_version + head + envelope.body


class Sealer:
    """Used by the agent: numbers its entries, and signs them if there is a ring."""

    def __init__(self, sender: str, incarnation: int, ring: KeyRing | None) -> None:
        self._sender, self._incarnation, self._ring = sender, incarnation, ring
        self._sequence = 0

    def seal(self, body: bytes) -> Envelope:
        """The next entry."""
        self._sequence += 1
        bare = Envelope(
            sender=self._sender, incarnation=self._incarnation, sequence=self._sequence, body=body,
            wire_version=wire.WIRE_VERSION,
        )  # fmt: skip
        return bare if self._ring is None else msgspec.structs.replace(bare, signature=self._ring.sign(_covered(bare)))


class Repeated(WireError):
    """A genuine entry that is not newer than the last one of its sender."""


class Superseded(Repeated):
    """A new entry of an older process, although a later process sends under the same name. One of the two is not the
    node that it claims to be."""


class Opener:
    """Used by the controller. Without a ring only the order is checked, not the origin."""

    def __init__(self, ring: KeyRing | None) -> None:
        self._ring = ring
        self._newest: dict[str, tuple[int, int]] = {}
        self._older: dict[str, tuple[int, int]] = {}
        """Sender -> newest number of the process before the current one."""
        self._unfinished: set[tuple[str, int, int]] = set()

    def open(self, envelope: Envelope) -> bytes:
        """The body. Raises `WireError` for a wrong signature and `Repeated` for an entry that is not new."""
        if self._ring is not None and not self._ring.verify(_covered(envelope), envelope.signature):
            raise WireError(f"entry of {envelope.sender!r} is not signed by an agent")
        number = (envelope.incarnation, envelope.sequence)
        newest = self._newest.pop(envelope.sender, (0, 0))
        self._newest[envelope.sender] = max(newest, number)
        if number[0] > newest[0] > 0:
            self._older[envelope.sender] = newest
        if len(self._newest) > MAX_SENDERS:
            forgotten = next(iter(self._newest))
            del self._newest[forgotten]
            self._older.pop(forgotten, None)
        if number > newest:
            return envelope.body
        try:
            self._unfinished.remove((envelope.sender, *number))
        except KeyError:
            older = self._older.get(envelope.sender, (0, 0))
            if older < number and number[0] < newest[0]:
                self._older[envelope.sender] = number
                if older[0] == number[0]:
                    raise Superseded(f"a later process than this sends as {envelope.sender!r}, too") from None
            raise Repeated(f"entry {envelope.sequence} of {envelope.sender!r} was there before") from None
        return envelope.body

    def numbers(self) -> dict[str, tuple[int, int]]:
        """Newest (incarnation, sequence) of each sender, for the next controller."""
        return dict(self._newest)

    def resume(self, numbers: dict[str, tuple[int, int]], unfinished: Iterable[tuple[str, int, int]] = ()) -> None:
        """Continue from a predecessor's numbers. `unfinished`: (sender, incarnation, sequence) of entries that it
        accepted but whose effect it had not stored. Each of them is accepted once more."""
        self._newest = {sender: (number[0], number[1]) for sender, number in numbers.items()}
        self._unfinished = set(unfinished)
