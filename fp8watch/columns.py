"""Packing per-tensor arrays into frames and reading them back, with "not observed" as a validity bitmap."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch.errors import WireError
from fp8watch.records import Column

_DTYPES: dict[str, np.dtype[Any]] = {"f4": np.dtype("<f4"), "u8": np.dtype("<u8"), "u1": np.dtype("u1")}


def pack(values: npt.NDArray[Any], dtype: str, valid: npt.NDArray[np.bool_] | None = None) -> Column:
    """Pack a 1-D array as `dtype` (f4, u8, u1); `valid` (bool, same length) marks what was observed."""
    return pack_raw(values.tobytes(), values.dtype, dtype, None if valid is None else validity_bitmap(valid))


def pack_raw(data: bytes, made_of: np.dtype[Any], dtype: str, bitmap: bytes | None) -> Column:
    """`pack` for an array that is already bytes, which are used as they are when their dtype is the column's.

    `bitmap` comes from `validity_bitmap`, and several columns may share it; None: everything was observed.
    """
    wanted = _DTYPES[dtype]
    if made_of != wanted:
        data = np.frombuffer(data, made_of).astype(wanted).tobytes()
    return Column(dtype=dtype, data=data, valid=bitmap)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _all_set(count: int) -> bytes:
    return np.packbits(np.ones(count, np.bool_), bitorder="little").tobytes()


def validity_bitmap(valid: npt.NDArray[np.bool_]) -> bytes | None:
    """`Column.valid` for these flags; None where all are set."""
    found: bytes = np.packbits(valid, bitorder="little").tobytes()
    return None if found == _all_set(len(valid)) else found


def spread(
    values: npt.NDArray[Any], valid: npt.NDArray[np.bool_], spots: npt.NDArray[np.intp], size: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """[size] arrays with `values` and their validity at `spots`, and nothing observed elsewhere."""
    wide, known = np.zeros(size, dtype=values.dtype), np.zeros(size, dtype=np.bool_)
    wide[spots], known[spots] = values, valid
    return wide, known


def unpack(column: Column) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """The values, and which of them were observed, both of the column's length.

    Raises `WireError` when data and bitmap do not fit each other.
    """
    dtype = _DTYPES[column.dtype]
    if len(column.data) % dtype.itemsize:
        raise WireError(f"column of {len(column.data)} bytes is no whole number of {column.dtype}")
    values = np.frombuffer(column.data, dtype=dtype)
    if column.valid is None:
        return values, np.ones(len(values), dtype=np.bool_)
    if len(column.valid) != (len(values) + 7) // 8:
        raise WireError(f"validity bitmap of {len(column.valid)} bytes for {len(values)} values")
    bits = np.unpackbits(np.frombuffer(column.valid, dtype=np.uint8), count=len(values), bitorder="little")
    return values, bits.astype(np.bool_)
