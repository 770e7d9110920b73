"""The values of one step on the host: the copied bytes, and the position of each tensor in them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Segment:
    """Position of a tensor's contiguous elements."""

    dtype: np.dtype[Any]
    start: int
    """Byte offset."""
    count: int
    """Number of elements."""
    is_scalar: bool

    @property
    def end(self) -> int:
        """Byte offset just after the last element."""
        return self.start + self.count * self.dtype.itemsize


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
        return float(struct.unpack_from(f"<{found.dtype.char}", self._memory, found.start)[0])

    def raw(self, name: str) -> bytes:
        """A tensor's little-endian bytes."""
        found = self.segments[name]
        return self._memory[found.start : found.end]

    def beside(self, other: Arrived) -> Arrived:
        """The values of both, which are one step's from two devices. They must not share a name."""
        offset = len(self._memory)
        moved = {
            name: Segment(found.dtype, found.start + offset, found.count, found.is_scalar)
            for name, found in other.segments.items()
        }
        return Arrived(self._memory + other._memory, {**self.segments, **moved})
