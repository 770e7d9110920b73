"""What-if figures of one step: summed cast by cast on the device, returned as columns of the step's reading.

Owned by a source that has access to the values of its casts. Its tap calls `offer`, on autograd's thread too.
Only sixteen numbers per tensor are kept.
"""

from __future__ import annotations

import torch

from fp8watch.capture.statistics.count import Item
from fp8watch.capture.statistics.what_if import what_if
from fp8watch.formats import Fp8Format
from fp8watch.what_if import CANDIDATES, column


class WhatIfLog:
    """Sums over the casts of a step: one row, with all candidates, per column of the source."""

    def __init__(self, num: int, device: torch.device) -> None:
        self._num, self._device = num, device
        self._wanted: frozenset[int] | None = frozenset()
        """Columns that are measured in this step; None: all."""
        self._counts: torch.Tensor | None = None
        """int64 [2, num, candidates]: underflowed, saturated. Allocated at first use."""
        self._sums: torch.Tensor | None = None
        """float32 [num, candidates + 1]: squared errors, then squared values."""
        self._has: list[bool] = [False] * num

    def begin(self, wanted: frozenset[int] | None) -> None:
        """Start a step. `wanted`: columns to measure; None: all, empty: none."""
        if any(self._has):
            assert self._counts is not None
            assert self._sums is not None
            self._counts.zero_()
            self._sums.zero_()
            self._has = [False] * self._num
        self._wanted = wanted

    def wants(self, position: int) -> bool:
        """Whether casts of this column should be offered."""
        return self._wanted is None or position in self._wanted

    def offer(
        self, position: int, *, values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, amax: torch.Tensor | None
    ) -> None:
        """Add one cast: its source values, the scale that multiplied them, and their amax if known."""
        if position >= self._num:
            self._grow(2 * position + 2)
        scale = scale.detach().float()
        found = what_if(Item(values=values.detach(), scale=scale, fmt=fmt), amax)
        if self._counts is None or self._sums is None:
            self._counts = torch.zeros(2, self._num, len(CANDIDATES), dtype=torch.int64, device=self._device)
            with torch.inference_mode(False):
                self._sums = torch.zeros(self._num, len(CANDIDATES) + 1, dtype=torch.float32, device=self._device)
        counts = torch.stack((found.underflowed, found.saturated))
        self._counts[:, position].add_(counts.to(self._device))
        sums = torch.cat((found.squared_error, found.squared_values.reshape(1)))
        self._sums[position].add_(sums.to(self._device))
        self._has[position] = True

    def _grow(self, num: int) -> None:
        """Make room for more columns: a source may discover them one by one."""
        more = num - self._num
        if self._counts is not None and self._sums is not None:
            self._counts = torch.nn.functional.pad(self._counts, (0, 0, 0, more))
            self._sums = torch.nn.functional.pad(self._sums, (0, 0, 0, more))
        self._has += [False] * more
        self._num = num

    def columns(self) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        """`(columns by name, which rows were measured)`, each [num]; None if none was."""
        if not any(self._has):
            return None
        assert self._counts is not None
        assert self._sums is not None
        pinned = torch.tensor(self._has, device="cpu", pin_memory=self._device.type == "cuda")
        has = pinned.to(self._device, non_blocking=True)
        snr = 10.0 * torch.log10(self._sums[:, -1:] / self._sums[:, :-1])
        values: dict[str, torch.Tensor] = {}
        for i, name in enumerate(CANDIDATES):
            values[column(name, "underflowed")] = self._counts[0, :, i].contiguous()
            values[column(name, "saturated")] = self._counts[1, :, i].contiguous()
            values[column(name, "snr")] = snr[:, i].contiguous()
        return values, has
