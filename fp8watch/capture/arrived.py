"""The values of one step on the host: the copied bytes, and the position of each tensor in them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_CODES = {
    "<f4": "<f", "<f8": "<d", "<f2": "<e", "<i4": "<i", "<i8": "<q", "|u1": "<B", "|b1": "<?",
}  # fmt: skip
"""How `struct` calls numpy's types. (Numpy's own letters differ: its `l` has 8 bytes.)"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Position of a tensor's contiguous elements."""

    dtype: np.dtype[Any]
    start: int
    """Byte offset."""
    count: int
    """Number of elements."""
    is_scalar: bool
    is_bf16: bool = False
    """Two bytes an element, the upper half of a float32. `dtype` is float32, to which they are widened when read."""

    @property
    def end(self) -> int:
        """Byte offset just after the last element."""
        return self.start + self.count * (2 if self.is_bf16 else self.dtype.itemsize)


class Arrived(Mapping[str, npt.NDArray[Any]]):
    """A step's values by name, as read-only arrays (0-D for a scalar).

    Arrays are made on access: most of a step is passed on as raw bytes.
    """

    __slots__ = ("_memory", "segments")

    def __init__(self, memory: bytes, segments: Mapping[str, Segment]) -> None:
        self._memory = memory
        self.segments = segments

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        found = self.segments[name]
        array: npt.NDArray[Any]
        if found.is_bf16:
            array = (np.frombuffer(self._memory, "<u2", found.count, found.start).astype("<u4") << 16).view("<f4")
        else:
            array = np.frombuffer(self._memory, found.dtype, found.count, found.start)
        return array.reshape(()) if found.is_scalar else array

    def __contains__(self, name: object) -> bool:
        return name in self.segments

    def __iter__(self) -> Iterator[str]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    def number(self, name: str) -> float:
        """The value of a scalar."""
        found = self.segments[name]
        if found.is_bf16:  # the missing lower half is two zero bytes
            return float(struct.unpack("<f", b"\0\0" + self._memory[found.start : found.end])[0])
        return float(struct.unpack_from(_CODES[found.dtype.str], self._memory, found.start)[0])

    def raw(self, name: str) -> bytes:
        """A tensor's little-endian bytes."""
        found = self.segments[name]
        return self[name].tobytes() if found.is_bf16 else self._memory[found.start : found.end]

    def beside(self, other: Arrived) -> Arrived:
        """The values of both, which are one step's from two devices. They must not share a name."""
        offset = len(self._memory)
        moved = {
            name: Segment(found.dtype, found.start + offset, found.count, found.is_scalar, found.is_bf16)
            for name, found in other.segments.items()
        }
        return Arrived(self._memory + other._memory, {**self.segments, **moved})
