"""What one step's copy has brought to the host: bytes, and where each number lies in them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a tensor's elements lie, side by side."""

    dtype: np.dtype[Any]
    start: int
    """Bytes from the beginning."""
    count: int
    """Elements."""
    is_scalar: bool

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.start + self.count * self.dtype.itemsize


class Arrived(Mapping[str, npt.NDArray[Any]]):
    """A step's values by name, as arrays that cannot be written to (0-D for a scalar).

    Arrays are made when they are asked for: most of a step goes on as the bytes it came as.
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
        """A scalar."""
        found = self.segments[name]
        return float(struct.unpack_from(f"<{found.dtype.char}", self._memory, found.start)[0])

    def raw(self, name: str) -> bytes:
        """A tensor's little-endian bytes."""
        found = self.segments[name]
        return self._memory[found.start : found.end]

    def beside(self, other: Arrived) -> Arrived:
        """The values of both: of two devices, one step. They share no name."""
        offset = len(self._memory)
        moved = {
            name: Segment(found.dtype, found.start + offset, found.count, found.is_scalar)
            for name, found in other.segments.items()
        }
        return Arrived(self._memory + other._memory, {**self.segments, **moved})
