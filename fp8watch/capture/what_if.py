"""What-if figures of one step: summed cast by cast on the device, returned as columns of the step's reading.

Owned by a source that has access to the values of its casts. Its tap calls `offer`, on autograd's thread too.
Only sixteen numbers per tensor are kept. A source may discover its columns one by one, so there is memory for a number
of them at a time, which never moves: another thread may just be adding to it.
"""

from __future__ import annotations

import threading

import torch

from fp8watch.capture.statistics.count import Item
from fp8watch.capture.statistics.what_if import what_if
from fp8watch.formats import Fp8Format
from fp8watch.what_if import CANDIDATES, column

ROOM = 128
"""Columns of a part of the memory: 13 KB."""


class WhatIfLog:
    """Sums over the casts of a step: one row, with all candidates, per column of the source."""

    def __init__(self, num: int | None, device: torch.device) -> None:
        """`num`: number of columns; None: it is not known, and `columns` returns as many as there is memory for."""
        self._num, self._device = num, device
        self._wanted: frozenset[int] | None = frozenset()
        """Columns that are measured in this step; None: all."""
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """int64 [2, ROOM, candidates]: underflowed, saturated; float32 [ROOM, candidates + 1]: squared errors, then
        squared values. Allocated at first use."""
        self._lock = threading.Lock()
        """For making parts."""
        self._has: set[int] = set()
        """Columns with casts in this step."""

    def begin(self, wanted: frozenset[int] | None) -> None:
        """Start a step. `wanted`: columns to measure; None: all, empty: none."""
        if self._has:
            for counts, sums in self._parts:
                counts.zero_()
                sums.zero_()
            self._has.clear()
        self._wanted = wanted

    def wants(self, position: int) -> bool:
        """Whether casts of this column should be offered."""
        return self._wanted is None or position in self._wanted

    def offer(
        self, position: int, *, values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, amax: torch.Tensor | None
    ) -> None:
        """Add one cast: its source values, the scale that multiplied them, and their amax if known."""
        scale = scale.detach().float()
        found = what_if(Item(values=values.detach(), scale=scale, fmt=fmt), amax)
        counts, sums = self._part(position // ROOM)
        row = position % ROOM
        counts[:, row].add_(torch.stack((found.underflowed, found.saturated)).to(self._device))
        sums[row].add_(torch.cat((found.squared_error, found.squared_values.reshape(1))).to(self._device))
        self._has.add(position)

    def _part(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number >= len(self._parts):
            # Or nothing could write to the memory when inference mode is over.
            with self._lock, torch.inference_mode(False):
                while number >= len(self._parts):
                    counts = torch.zeros(2, ROOM, len(CANDIDATES), dtype=torch.int64, device=self._device)
                    sums = torch.zeros(ROOM, len(CANDIDATES) + 1, dtype=torch.float32, device=self._device)
                    self._parts.append((counts, sums))
        return self._parts[number]

    def columns(self) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        """`(columns by name, which rows were measured)`, all of one length; None if none was."""
        if not self._has:
            return None
        parts = list(self._parts)
        num = len(parts) * ROOM if self._num is None else self._num
        while len(parts) * ROOM < num:  # of columns that were never measured
            parts.append((torch.zeros_like(parts[0][0]), torch.zeros_like(parts[0][1])))
        counts = torch.cat([part[0] for part in parts], 1)[:, :num]
        sums = torch.cat([part[1] for part in parts])[:num]
        pinned = torch.zeros(num, dtype=torch.bool, device="cpu", pin_memory=self._device.type == "cuda")
        pinned.numpy()[sorted(self._has)] = True
        has = pinned.to(self._device, non_blocking=True)
        snr = 10.0 * torch.log10(sums[:, -1:] / sums[:, :-1])
        values: dict[str, torch.Tensor] = {}
        for i, name in enumerate(CANDIDATES):
            values[column(name, "underflowed")] = counts[0, :, i].contiguous()
            values[column(name, "saturated")] = counts[1, :, i].contiguous()
            values[column(name, "snr")] = snr[:, i].contiguous()
        return values, has
