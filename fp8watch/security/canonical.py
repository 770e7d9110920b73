"""The canonical bytes of a record, over which it is signed.

Canonical means msgpack with sorted map keys and an empty signature, after a header with the version of this rule. Every
field is covered, so none (run, start, attempt, term, parameters, expiry) can be exchanged. The record's tag is a field
too, so a signature of one type of record is not valid for another.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from fp8watch.records import Record
from fp8watch.security.keyring import KeyRing

_encoder = msgspec.msgpack.Encoder(order="sorted")
_LATER = ("start", "nodes")
"""Fields added after version 1. They are omitted while empty, so that signatures from earlier versions stay valid, and
earlier versions can verify records without them."""

R = TypeVar("R", bound=Record)


def canonical(record: Record) -> bytes:
    """The bytes to sign. They are the same before and after the record has crossed the wire."""
    bare = msgspec.structs.replace(record, signature=b"")
    # Through builtin types: a decoded record has lists where the sender may have had tuples.
    plain = msgspec.to_builtins(bare, builtin_types=(bytes,))
    return b"fp8watch 1 " + _encoder.encode({k: v for k, v in plain.items() if v or k not in _LATER})


def signed(record: R, ring: KeyRing) -> R:
    """The record with its signature."""
    return msgspec.structs.replace(record, signature=ring.sign(canonical(record)))


def is_signed(record: Record, ring: KeyRing) -> bool:
    """Whether a holder of the ring's key signed exactly this record. Raises nothing."""
    signature: bytes = getattr(record, "signature", b"")
    try:
        payload = canonical(record)
    except (TypeError, ValueError, RecursionError):  # no canonical form, so nobody can have signed it
        return False
    return ring.verify(payload, signature)
