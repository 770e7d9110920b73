"""Casts with one scale per row, column or block: how many of the blocks clip, and how far the scales spread.

The smallest and largest scale of a tensor do not show how much is clipped, and the share of clipped elements does not
show where: it may be a little of every block, or all of a few. Measured on sampled steps, with the element counts, by
one reduction over the tensor and a few small kernels per cast, without a copy of it and without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8watch.capture.statistics.count import local
from fp8watch.formats import Fp8Format

SLACK = 2.0**-10
"""Relative excess over the format's maximum that is rounding of the scale, not clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStatistics:
    """0-D tensors on the tensor's device."""

    blocks: torch.Tensor
    """int64: number of scales."""
    clipped_blocks: torch.Tensor
    """int64: blocks with an element beyond the format's maximum after scaling (or an infinite one)."""
    largest: torch.Tensor
    """float32: largest finite scale; 0 if there is none."""
    smallest: torch.Tensor
    """float32: smallest finite scale; infinite if there is none."""


def block_statistics(values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> BlockStatistics | None:
    """Statistics of one cast. `scale` broadcasts over `values` dimension by dimension; None if there is only one scale.

    A block with a NaN does not count as clipped, because that is unknown.
    """
    values, scale = local(values), local(scale)
    if scale.numel() <= 1 or scale.dim() != values.dim() or not values.numel():
        return None
    within = [axis for axis, size in enumerate(scale.shape) if size == 1 and values.shape[axis] != 1]
    scale = scale.float()
    amax = torch.linalg.vector_norm(values, float("inf"), dim=within, keepdim=True).float() if within else values.abs()
    is_finite = torch.isfinite(scale) & (scale > 0)
    return BlockStatistics(
        blocks=torch.full((), scale.numel(), dtype=torch.int64, device=scale.device),
        clipped_blocks=torch.count_nonzero(amax * scale > fmt.max * (1.0 + SLACK)),
        largest=torch.where(is_finite, scale, 0.0).amax(),
        smallest=torch.where(is_finite, scale, torch.inf).amin(),
    )


def spread_log2(largest: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """float32: log2 of largest over smallest scale; 0 without a scale."""
    return torch.where(largest > 0, torch.log2(largest / smallest), 0.0)
