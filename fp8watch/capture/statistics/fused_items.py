"""Which tensors the fused kernels can read in place, and in what way; used by `kernels` and `what_if_kernels`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fp8watch.capture.to_device import to_device

if TYPE_CHECKING:
    from fp8watch.capture.statistics.count import Item

ONE, A_ROW, A_COLUMN = 0, 1, 2
"""How a scale broadcasts over its tensor: one, one per row (last dimension), one per column."""
ADJACENT = 16
"""Bytes of the longest load, and elements whose FP8 codes it takes: what addresses (in bytes) and row lengths (in
elements) are multiples of in a tensor that is read by such loads."""
LARGE = 1 << 30
"""Rows, or elements of a row, from which the kernels' 32-bit places would overflow."""


def by_rows(item: Item) -> Item:
    """A transposed matrix (torchao's weights) as it lies in memory, because counts do not depend on the order."""
    values, scale = item.values, item.scale
    if values.dim() != 2 or scale.dim() > 2 or values.is_contiguous() or not values.t().is_contiguous():
        return item
    if scale.dim() == 1 and scale.numel() > 1:  # one per column, as tensors broadcast
        scale = scale.reshape(1, -1)
    scale = scale.t()
    codes = None if item.codes is None else item.codes.t()
    return replace(item, values=values.t(), scale=scale, codes=codes)


def is_plain(item: Item) -> bool:
    """Whether values, scale and codes lie in one GPU's memory row by row, without gaps."""
    values, scale, codes = item.values, item.scale, item.codes
    return (
        values.device.type == "cuda"
        and type(values) in (torch.Tensor, torch.nn.Parameter)
        and values.is_contiguous()
        and values.numel() > 0
        and type(scale) is torch.Tensor
        and scale.device == values.device
        and scale.dtype == torch.float32
        and scale.is_contiguous()
        and scale_mode(values, scale) is not None
        and (scale.numel() == 1 or not is_large(values))
        and (codes is None or (codes.is_contiguous() and codes.shape == values.shape and codes.element_size() == 1))
    )


def scale_mode(values: torch.Tensor, scale: torch.Tensor) -> int | None:
    """How `scale` broadcasts over `values`; None: in another way than the kernels know."""
    if scale.numel() == 1:
        return ONE
    if values.dim() and scale.shape == (*values.shape[:-1], 1):
        return A_ROW
    if values.dim() and scale.numel() == values.shape[-1] and scale.shape[-1] == values.shape[-1]:
        return A_COLUMN
    return None


def row_length(values: torch.Tensor) -> int:
    """Elements that lie between two changes of a row's scale, or of a row's tiles."""
    return values.shape[-1] if values.dim() else 1


def is_large(values: torch.Tensor) -> bool:
    """Whether a row, or the rows, are too many to be numbered in 32 bits."""
    length = row_length(values)
    return max(length, values.numel() // length) >= LARGE


def is_regular(item: Item, *, by_row: bool) -> bool:
    """Whether a thread may take 16 bytes at once, all of them in one row (even if the scale is the same: `by_row`)."""
    values, scale = item.values, item.scale
    addresses = values.data_ptr() | (0 if item.codes is None else item.codes.data_ptr())
    mode = scale_mode(values, scale)
    if mode == A_COLUMN:
        addresses |= scale.data_ptr()
    numel = row_length(values) if by_row or mode != ONE else values.numel()
    return addresses % ADJACENT == 0 and numel % ADJACENT == 0


def on_device(rows: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """A table of int64 that is on the device before what is launched next, without waiting for it."""
    return to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
