"""Counters for a step's casts: a row per column, in buffers on the device that do not move while casts are counted.

Columns are discovered by their first casts, on several threads. A row keeps its place until the step is over: another
thread may just be launching a kernel that adds to it, and counts must not be lost. So rows that are new go to another
buffer, and only the start of a later step joins all of them in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

Key = tuple[str, str]
"""Identifies a column: qualified module name, tensor."""
NUM_COUNTS, NUM_SUMS = 4, 2
"""Saturated, non-zero before, non-zero before and after, non-finite; squared error, squared values."""
Place = tuple[torch.Tensor, torch.Tensor, int, int]
"""Of a row: `counts`, `sums`, `counts_at` and `sums_at` of `CastRow`."""
ROOM = 128
"""Rows of a buffer for new columns: those of ten layers, 1.6 MB on a GPU. 1,680 columns take 14 such buffers once."""


@dataclass(slots=True, eq=False)
class CastRow:
    """One column's place in a buffer, and what the host knows of it in this step."""

    key: Key
    number: int
    """Position among the rows, in the order of their first casts."""
    is_of_forward: bool
    """Cast in the forward pass: an input, a weight or an output."""
    counts: torch.Tensor
    """int32 (int64 with only one program), [programs, NUM_COUNTS]."""
    sums: torch.Tensor
    """float32 [programs, NUM_SUMS]."""
    counts_at: int
    sums_at: int
    """Their addresses, cached because a query would cost time in every cast."""
    elements: int = 0
    """Number counted in this step."""
    is_forward_done: bool = False
    last: tuple[Any, torch.dtype, Any] | None = None
    """How the next cast is launched if it is like the last one: `fp8watch.capture.triton_launch.Shortcut`, dtype of
    the source, and the framework's name for the format."""
    fused: Any | None = None
    """The same of a cast inside a norm or an activation: see `fp8watch.capture.te.fused_casts`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """Places for a number of rows, in one memory, which is cleared at once."""

    memory: torch.Tensor
    """The counts and then the sums, uint8."""
    counts: torch.Tensor
    """[rows, programs, NUM_COUNTS]"""
    sums: torch.Tensor
    """[rows, programs, NUM_SUMS]"""

    def places(self) -> Iterator[Place]:
        """Of all rows, in order."""
        counts, sums = self.counts.unbind(), self.sums.unbind()
        return zip(counts, sums, _addresses(self.counts), _addresses(self.sums), strict=True)


def _addresses(rows: torch.Tensor) -> range:
    """Where each row begins; to ask each of them takes milliseconds."""
    start, step = rows.data_ptr(), rows.stride(0) * rows.itemsize
    return range(start, start + len(rows) * step, step)


class CastRows:
    """`programs`: number of partial sums per row, which are added up when the step is over.

    `row` may be called on any thread, by one at a time; all else only between steps.
    """

    def __init__(self, device: torch.device, programs: int) -> None:
        self.device, self._programs = device, programs
        self._rows: dict[Key, CastRow] = {}
        # One program's share of a step's elements fits into 32 bits; all of them may not.
        self._dtype = torch.int64 if programs == 1 else torch.int32
        self._buffers: list[_Buffer] = []
        self._free: Iterator[Place] = iter(())
        """Places without a row."""
        self._most = 1
        """Buffers that are not joined."""
        self._left: list[_Buffer] = []
        """Buffers that the rows have left in this step."""

    def __iter__(self) -> Iterator[CastRow]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: Key) -> CastRow | None:
        """The row of a column, None if it has none yet."""
        return self._rows.get(key)

    def row(self, key: Key) -> CastRow:
        """The row of a column, made at the first call."""
        found = self._rows.get(key)
        if found is None:
            place = next(self._free, None)
            if place is None:
                buffer = self._allocate(ROOM)
                self._buffers.append(buffer)
                self._free = buffer.places()
                place = next(self._free)
            is_of_forward = key[1] in ("input", "weight", "output")
            found = self._rows[key] = CastRow(key, len(self._rows), is_of_forward, *place)
        return found

    def clear(self) -> None:
        """Start a new step with all counters at 0."""
        self.release()
        if len(self._buffers) > self._most:
            try:
                self._join()
            except torch.OutOfMemoryError:  # these do as well, and to ask in vain each time would wait for the device
                self._most = len(self._buffers)
        for buffer in self._buffers:
            buffer.memory.zero_()
        for row in self._rows.values():
            row.elements, row.is_forward_done = 0, False

    def release(self) -> None:
        """Free what the rows have left. They left it a step ago, so no thread and no stream adds to it any more."""
        self._left.clear()

    def totals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over the programs: int64 [rows or more, NUM_COUNTS], float32 [rows or more, NUM_SUMS]."""
        counts = [buffer.counts.sum(1, dtype=torch.int64) for buffer in self._buffers]
        sums = [buffer.sums.sum(1) for buffer in self._buffers]
        if len(counts) == 1:  # each operation is a launch on a GPU
            return counts[0], sums[0]
        return torch.cat(counts), torch.cat(sums)

    def _join(self) -> None:
        """Give all rows a place in one buffer, just large enough."""
        joined = self._allocate(len(self._rows))
        self._left, self._buffers, self._free, self._most = self._buffers, [joined], iter(()), 1
        for row, place in zip(self._rows.values(), joined.places(), strict=True):
            row.counts, row.sums, row.counts_at, row.sums_at = place

    def _allocate(self, room: int) -> _Buffer:
        num_counts = room * self._programs * NUM_COUNTS * self._dtype.itemsize
        num_sums = room * self._programs * NUM_SUMS * torch.float32.itemsize
        with torch.inference_mode(False):  # or nothing could write to the memory when inference mode is over
            memory = torch.zeros(num_counts + num_sums, dtype=torch.uint8, device=self.device)
            counts = memory[:num_counts].view(self._dtype).view(room, self._programs, NUM_COUNTS)
            sums = memory[num_counts:].view(torch.float32).view(room, self._programs, NUM_SUMS)
        return _Buffer(memory, counts, sums)
