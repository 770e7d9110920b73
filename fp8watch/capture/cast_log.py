"""amax and scale of the casts that passed the taps in one step: kept as one-element tensors, combined at the boundary.

That takes one stacking for all casts of a step instead of a kernel launch per cast. Backward casts run on autograd's
thread, but on the stream of their forward. A weight cast by FSDP's all-gather runs on a stream that waits for the
training stream before it writes again, so the values are read here before they are overwritten.
"""

from __future__ import annotations

import torch

FOLD_AT = 4096
"""Casts kept before they are folded: 4 MiB of the allocator's smallest blocks, however long the accumulation."""


class CastLog:
    """amax and scale of `num` columns.

    `ignored` (float32 [num], NaN: none): for each column, an amax value that counts as 0.
    """

    def __init__(self, num: int, device: torch.device, *, ignored: torch.Tensor | None = None) -> None:
        self.num = num
        """Number of columns."""
        self._device, self._ignored = device, ignored
        self._pending: list[list[tuple[torch.Tensor | None, torch.Tensor | None, float]]] = [[] for _ in range(num)]
        self._size = 0
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._is_used = False
        self._amax = torch.zeros(num, dtype=torch.float32, device=device)
        self._amax_last = torch.zeros(num, dtype=torch.float32, device=device)
        self._scale = torch.full((num,), torch.inf, dtype=torch.float32, device=device)
        self._has_cast = torch.zeros(num, dtype=torch.bool, device=device)

    def __bool__(self) -> bool:
        return self._is_used

    def clear(self) -> None:
        """Start a new step."""
        for column in self._pending:
            column.clear()
        self._size, self._is_used = 0, False
        for values in (self._amax, self._amax_last, self._has_cast):
            values.zero_()
        self._scale.fill_(torch.inf)

    def add(self, column: int, *, amax: torch.Tensor | None, scale: torch.Tensor | None, fp8_max: float) -> None:
        """Add one cast. Several scales (of rows) are reduced to the smallest at once, to save memory.

        A missing amax is taken to be `fp8_max / scale`; without a scale nothing was cast.
        """
        if scale is not None:
            if isinstance(amax, torch.Tensor) and hasattr(amax, "to_local"):
                amax = None  # a local maximum: the scale was reduced over ranks, the amax was not
            scale = scale.to_local() if hasattr(scale, "to_local") else scale
            scale = scale.detach().amin() if scale.numel() > 1 else scale.detach().reshape(())
        if amax is not None:
            amax = amax.detach().amax() if amax.numel() > 1 else amax.detach().reshape(())
        self._pending[column].append((amax, scale, fp8_max))
        self._is_used = True
        self._size += 1
        if self._size >= FOLD_AT:
            self._fold()

    def take_over(self, other: CastLog) -> None:
        """Copy the contents of a log of fewer columns to the same positions. Do not use `other` afterwards."""
        amax, amax_last, scale, has_cast = other.total()
        for mine, theirs in (
            (self._amax, amax), (self._amax_last, amax_last), (self._scale, scale), (self._has_cast, has_cast),
        ):  # fmt: skip
            mine[: other.num] = theirs
        self._is_used = other._is_used

    def total(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """amax (largest), amax_last, scale (smallest, the one of the largest amax; infinite: none used), has_cast.

        Four tensors [num]; they remain the log's own, so do not write to them.
        """
        self._fold()
        return self._amax, self._amax_last, self._scale, self._has_cast

    def _fold(self) -> None:
        used = [i for i, casts in enumerate(self._pending) if casts]
        if not used:
            return
        depth = max(len(self._pending[i]) for i in used)
        unused = torch.full((), torch.inf, dtype=torch.float32, device=self._device)
        amaxes: list[torch.Tensor] = []
        scales: list[torch.Tensor] = []
        for i in used:
            row = self._pending[i]
            row = [row[0]] * (depth - len(row)) + row  # padded in front, so that the last stays the last
            amaxes.extend(self._amax_of(*cast) for cast in row)
            scales.extend(unused if scale is None else self._here(scale) for _, scale, _ in row)
            self._pending[i] = []
        self._size = 0
        amax = torch.stack(amaxes).float().view(len(used), depth)
        scale = torch.stack(scales).float().view(len(used), depth)
        index = self._index(tuple(used))
        if self._ignored is not None:
            amax = torch.where(amax == self._ignored[index].unsqueeze(1), 0.0, amax)
        self._amax[index] = torch.maximum(self._amax[index], amax.amax(1))
        self._amax_last[index] = amax[:, -1]
        self._scale[index] = torch.minimum(self._scale[index], scale.amin(1))
        self._has_cast[index] = torch.ones(len(used), dtype=torch.bool, device=self._device)

    def _amax_of(self, amax: torch.Tensor | None, scale: torch.Tensor | None, fp8_max: float) -> torch.Tensor:
        if amax is not None:
            return self._here(amax)
        assert scale is not None
        return self._here(fp8_max / scale)

    def _here(self, value: torch.Tensor) -> torch.Tensor:
        return value if value.device == self._device else value.to(self._device)

    def _index(self, columns: tuple[int, ...]) -> torch.Tensor:
        """The columns as an index on the device. Cached, because a copy that does not wait needs pinned memory."""
        if columns not in self._indices:
            if len(self._indices) >= 64:
                self._indices.clear()
            pinned = torch.tensor(columns, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
            self._indices[columns] = pinned.to(self._device, non_blocking=True)
        return self._indices[columns]
