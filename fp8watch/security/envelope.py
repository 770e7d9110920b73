"""What an agent sends to the controller, authenticated: who, in which order, and that nobody changed it on the way.

`seal` covers the sender's name, its incarnation (the time it started) and a sequence number besides the body, so that
an entry cannot be sent again, moved to another sender, or brought up after a restart: `Opener` takes each sender's
numbers in increasing order only. Gaps are allowed; losing entries is not forging them.
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
"""Senders whose newest number is kept; beyond it the one heard least recently is forgotten."""
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_NUMBERS = struct.Struct(">QQ")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A body with the proof of where it comes from."""

    sender: Annotated[str, msgspec.Meta(max_length=256)]
    """Node name of the agent."""
    incarnation: Number
    """Unix time in nanoseconds at which this agent process started."""
    sequence: Number
    """Grows by at least one an entry."""
    body: bytes
    signature: bytes = b""
    wire_version: Number = 1
    """Of the body (`fp8watch.wire.WIRE_VERSION` of the agent)."""


_decoder = msgspec.msgpack.Decoder(Envelope)


def unpack(data: bytes) -> Envelope:
    """Decode an entry, whose origin is not known yet. Raises `WireError` for whatever is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # deep nesting in a field that is passed over
        raise WireError(str(error)) from error


def _covered(envelope: Envelope) -> bytes:
    sender = envelope.sender.encode()
    head = struct.pack(">H", len(sender)) + sender + _NUMBERS.pack(envelope.incarnation, envelope.sequence)
    return b"fp8watch envelope %d " % envelope.wire_version + head + envelope.body


class Sealer:
    """The agent's side: numbers its entries. No ring: the entries are numbered but not signed."""

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
    """An entry that is genuine, and not newer than what its sender has sent already."""


class Superseded(Repeated):
    """It was not there before: its sender goes on although a later process sends under the same name. One of the two
    is not the node that it says it is."""


class Opener:
    """The controller's side. No ring: order is checked, origin is not."""

    def __init__(self, ring: KeyRing | None) -> None:
        self._ring = ring
        self._newest: dict[str, tuple[int, int]] = {}
        self._older: dict[str, tuple[int, int]] = {}
        """Sender -> the newest number of the process before its present one."""
        self._unfinished: set[tuple[str, int, int]] = set()

    def open(self, envelope: Envelope) -> bytes:
        """The body. Raises `WireError` when it is not the agent's own, `Repeated` when it was there before."""
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
        """Newest (incarnation, sequence) of each sender, for a successor."""
        return dict(self._newest)

    def resume(self, numbers: dict[str, tuple[int, int]], unfinished: Iterable[tuple[str, int, int]] = ()) -> None:
        """Go on from what a predecessor had taken. `unfinished`: (sender, incarnation, sequence) of entries among it
        whose effect it had not kept; each is taken once more."""
        self._newest = {sender: (number[0], number[1]) for sender, number in numbers.items()}
        self._unfinished = set(unfinished)
