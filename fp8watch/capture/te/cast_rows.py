"""Counters for a step's casts: a row per column, in two buffers on the device that grow as columns are discovered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

Key = tuple[str, str]
"""Identifies a column: qualified module name, tensor."""
NUM_COUNTS, NUM_SUMS = 4, 2
"""Saturated, non-zero before, non-zero after, non-finite; squared error, squared values."""
FIRST_ROOM = 64
"""Rows allocated at first, enough for about ten layers; doubled when they do not suffice."""


@dataclass(slots=True, eq=False)
class CastRow:
    """One column's place in the buffers, and what the host knows of it in this step."""

    key: Key
    number: int
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


class CastRows:
    """`programs`: number of partial sums per row, which are added up when the step is over."""

    def __init__(self, device: torch.device, programs: int) -> None:
        self.device, self._programs = device, programs
        self._rows: dict[Key, CastRow] = {}
        # One program's share of a step's elements fits into 32 bits; all of them may not.
        self._dtype = torch.int64 if programs == 1 else torch.int32
        self._memory, self.counts, self.sums = self._allocate(0)
        """`counts`: [rows, programs, NUM_COUNTS], in the order of the rows; `sums`: [rows, programs, NUM_SUMS]."""

    def __iter__(self) -> Iterator[CastRow]:
        return iter(self._rows.values())

    def get(self, key: Key) -> CastRow | None:
        """The row of a column, None if it has none yet."""
        return self._rows.get(key)

    def row(self, key: Key) -> CastRow:
        """The row of a column, made at the first call."""
        found = self._rows.get(key)
        if found is None:
            number = len(self._rows)
            is_of_forward = key[1] in ("input", "weight", "output")
            with torch.inference_mode(False):  # or nothing outside of it could write to the row
                if number >= len(self.counts):
                    self._grow()
                found = self._rows[key] = CastRow(key, number, is_of_forward, *self._place(number))
        return found

    def clear(self) -> None:
        """Start a new step with all counters at 0."""
        self._memory.zero_()
        for row in self._rows.values():
            row.elements, row.is_forward_done = 0, False

    def _place(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        counts, sums = self.counts[number], self.sums[number]
        return counts, sums, counts.data_ptr(), sums.data_ptr()

    def _grow(self) -> None:
        counts, sums = self.counts, self.sums
        self._memory, self.counts, self.sums = self._allocate(max(FIRST_ROOM, 2 * len(self._rows)))
        self.counts[: len(counts)], self.sums[: len(sums)] = counts, sums
        for row in self._rows.values():
            row.counts, row.sums, row.counts_at, row.sums_at = self._place(row.number)

    def _allocate(self, room: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Zeros for a number of rows: one memory, which is cleared at once, with the counts and then the sums in it."""
        num_counts = room * self._programs * NUM_COUNTS * self._dtype.itemsize
        num_sums = room * self._programs * NUM_SUMS * torch.float32.itemsize
        memory = torch.zeros(num_counts + num_sums, dtype=torch.uint8, device=self.device)
        counts = memory[:num_counts].view(self._dtype).view(room, self._programs, NUM_COUNTS)
        sums = memory[num_counts:].view(torch.float32).view(room, self._programs, NUM_SUMS)
        return memory, counts, sums
