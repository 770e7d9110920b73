"""What exactly is signed: canonical bytes of a record.

Canonical means msgpack with sorted map keys and the signature left empty, after a head that names the version of this
rule. The record's tag is among its fields, so that a signature of one kind is never one of another, and every field
is covered: neither run, start, attempt, term, parameters nor expiry can be exchanged.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from fp8watch.records import Record
from fp8watch.security.keyring import KeyRing

_encoder = msgspec.msgpack.Encoder(order="sorted")
_LATER = ("start", "nodes")
"""Fields that the first records had not. They are left out while they are empty, so that what an earlier version has
signed is still verified, and by an earlier version what has none."""

R = TypeVar("R", bound=Record)


def canonical(record: Record) -> bytes:
    """The bytes that are signed: the same before and after the record has crossed the wire."""
    bare = msgspec.structs.replace(record, signature=b"")
    # Through plain objects, because what came over the wire has lists where the sender may have had tuples.
    plain = msgspec.to_builtins(bare, builtin_types=(bytes,))
    return b"fp8watch 1 " + _encoder.encode({k: v for k, v in plain.items() if v or k not in _LATER})


def signed(record: R, ring: KeyRing) -> R:
    """The record with its signature."""
    return msgspec.structs.replace(record, signature=ring.sign(canonical(record)))


def is_signed(record: Record, ring: KeyRing) -> bool:
    """Whether a holder of the ring's purpose signed exactly this record. Raises nothing."""
    signature: bytes = getattr(record, "signature", b"")
    try:
        payload = canonical(record)
    except (TypeError, ValueError, RecursionError):  # parameters that have no canonical form: nobody can have signed it
        return False
    return ring.verify(payload, signature)
