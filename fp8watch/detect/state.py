"""Encoding of detector states, so that a standby controller continues exactly where another stopped.

States are `msgspec` structs; numpy arrays in them travel as (dtype, shape, bytes), amax windows without redundant
entries. Detectors own the state they are given and may reuse its arrays; `encode` takes a snapshot.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

from fp8watch.detect.amax_window import AmaxWindows

S = TypeVar("S")


def _encode_hook(value: Any) -> Any:
    if isinstance(value, AmaxWindows):
        return value.packed()
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a detector state")


def _decode_hook(kind: Any, value: Any) -> Any:
    if kind is AmaxWindows:
        return AmaxWindows.unpacked(value)
    if kind is np.ndarray or get_origin(kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
    raise NotImplementedError(f"{kind} in a detector state")


def encode(state: Any) -> bytes:
    """The state as msgpack."""
    return msgspec.msgpack.encode(state, enc_hook=_encode_hook)


def decode(data: bytes | msgspec.Raw, kind: type[S]) -> S:
    """The state of type `kind` that `encode` packed. Raises `msgspec.DecodeError` or `ValidationError`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_hook)
