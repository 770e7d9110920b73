"""What exactly is signed: canonical bytes of a record.

Canonical means msgpack with sorted map keys and the signature left empty, after a head that names the version of this
rule. The record's tag is among its fields, so that a signature of one kind is never one of another, and every field
is covered: neither run, attempt, term, parameters nor expiry can be exchanged.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from fp8watch.records import Record
from fp8watch.security.keyring import KeyRing

_encoder = msgspec.msgpack.Encoder(order="sorted")


R = TypeVar("R", bound=Record)


def canonical(record: Record) -> bytes:
    """The bytes that are signed: the same before and after the record has crossed the wire."""
    bare = msgspec.structs.replace(record, signature=b"")
    # Through plain objects, because what came over the wire has lists where the sender may have had tuples.
    return b"fp8watch 1 " + _encoder.encode(msgspec.to_builtins(bare, builtin_types=(bytes,)))


def signed(record: R, ring: KeyRing) -> R:
    """The record with its signature."""
    return msgspec.structs.replace(record, signature=ring.sign(canonical(record)))


def is_signed(record: Record, ring: KeyRing) -> bool:
    """Whether a holder of the ring's purpose signed exactly this record."""
    signature: bytes = getattr(record, "signature", b"")
    return ring.verify(canonical(record), signature)
