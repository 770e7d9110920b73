"""The socket's format: a 4-byte big-endian length, then one msgpack record.

A record that is of another wire version, too large, truncated, malformed or out of bounds (`fp8watch.bounds`) raises
`WireError`: receivers count it, drop it and go on. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from fp8watch import bounds
from fp8watch.errors import WireError
from fp8watch.records import Message, Record, Reply, Stored, Uplink

WIRE_VERSION = 1
READABLE_VERSIONS = frozenset({1})
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""A frame of 1,680 tensors is about 47 KB; a layout of 20,000 tensors about 3 MB."""

_HEADER = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_stored_decoder: msgspec.msgpack.Decoder[Stored] = msgspec.msgpack.Decoder(Stored)
_uplink_decoder: msgspec.msgpack.Decoder[Uplink] = msgspec.msgpack.Decoder(Uplink)


def pack(record: msgspec.Struct) -> bytes:
    """The record's msgpack body, without the length."""
    return _encoder.encode(record)


def frame(record: Record) -> bytes:
    """The record as it goes over the socket, length first."""
    body = pack(record)
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(body)} bytes, limit {MAX_MESSAGE_BYTES}")
    return _HEADER.pack(len(body)) + body


def _decode(decoder: msgspec.msgpack.Decoder[Record], body: bytes) -> Record:
    try:
        record = decoder.decode(body)
        bounds.check(record)
        return record
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(str(error)) from error


def unpack_message(body: bytes) -> Message:
    """Decode what a rank sent. Raises `WireError`."""
    return _decode(_message_decoder, body)  # type: ignore[arg-type, return-value]


def unpack_reply(body: bytes) -> Reply:
    """Decode what an agent sent. Raises `WireError`."""
    return _decode(_reply_decoder, body)  # type: ignore[arg-type, return-value]


def unpack_uplink(body: bytes) -> Uplink:
    """Decode what an agent sent to the controller of a cluster. Raises `WireError`."""
    return _decode(_uplink_decoder, body)  # type: ignore[arg-type, return-value]


def unpack_stored(body: bytes) -> Stored:
    """Decode what a store holds. Raises `WireError`."""
    return _decode(_stored_decoder, body)  # type: ignore[arg-type, return-value]


class Splitter:
    """Cuts a byte stream into message bodies; feed it what arrived, take what is complete."""

    def __init__(self, limit: int = MAX_MESSAGE_BYTES) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield every complete body. Raises `WireError` on an oversized length, after which the stream is lost."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > self._limit:
                raise WireError(f"message of {length} bytes announced, limit {self._limit}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield body
