"""Casts with a scale a row, a column or a block: how many of their blocks clip, and how far the scales spread.

The smallest and largest scale of a tensor say nothing of how much is clipped, and a share of clipped elements nothing
of where: the same share is a little of every block, or all of a few. Counted on sampled steps, beside the elements. One
reduction over the tensor and a few small kernels a cast, no copy of it; nothing is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8watch.formats import Fp8Format

SLACK = 2.0**-10
"""Relative excess over the format's maximum that is rounding of the scale, not clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStatistics:
    """0-dim tensors on the tensor's device."""

    blocks: torch.Tensor
    """int64: scales that take part."""
    clipped_blocks: torch.Tensor
    """int64: blocks with an element beyond the format's maximum after scaling (or an infinite one)."""
    largest: torch.Tensor
    """float32: largest finite scale; 0 where there is none."""
    smallest: torch.Tensor
    """float32: smallest finite scale; infinite where there is none."""


def block_statistics(values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> BlockStatistics | None:
    """Of one cast; `scale` broadcasts over `values` dimension by dimension. None where there is but one scale.

    A NaN in a block leaves open whether it clips: it does not count as clipped.
    """
    values, scale = _local(values), _local(scale)
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
    """float32: bits between largest and smallest scale; 0 where there is no scale."""
    return torch.where(largest > 0, torch.log2(largest / smallest), 0.0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
