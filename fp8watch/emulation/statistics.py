"""Element counts and error of one cast, for sampled steps.

The cast is that of `fp8watch.emulation.cast`, bit for bit, except that it keeps values instead of overwriting them.
On a CPU, where reading amax costs no synchronisation, a pass is skipped if amax already proves its result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fp8watch.emulation.cast import round_to_fp8
from fp8watch.formats import Fp8Format


@dataclass(frozen=True, slots=True, kw_only=True)
class CastStatistics:
    """All 0-D tensors: counts int64, `squared_error` and `squared_values` (sums, unscaled) float32."""

    quantized: torch.Tensor
    saturated: torch.Tensor
    """Magnitude above the format's maximum after scaling."""
    underflowed: torch.Tensor
    """Not zero before, zero after."""
    nonfinite: torch.Tensor
    """NaN or infinite before."""
    squared_error: torch.Tensor
    squared_values: torch.Tensor


def quantize_and_count(
    values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, amax: torch.Tensor
) -> tuple[torch.Tensor, CastStatistics]:
    """`quantize`, and the statistics of the cast; `amax` is that of `values`.

    `scale` has one element, or broadcasts over `values` (one per row or column).
    """
    values = values.float()
    scaled = values * scale
    flat = values.reshape(-1)
    squared_values = torch.dot(flat, flat)
    may_saturate = may_be_nonfinite = may_zeros_change = True
    if values.device.type == "cpu":
        may_saturate = scale.numel() > 1 or not bool(amax * scale.abs() <= fmt.max)
        may_be_nonfinite = not bool(torch.isfinite(squared_values))
        may_zeros_change = not bool(torch.isfinite(scale).all())  # times such a scale, zero is NaN
    zero = torch.zeros((), dtype=torch.int64, device=values.device)
    saturated = _count_nonzero(scaled.abs() > fmt.max) if may_saturate else zero
    nonfinite = _count_nonzero(~torch.isfinite(values)) if may_be_nonfinite else zero
    codes = round_to_fp8(scaled.clamp(-fmt.max, fmt.max) if may_saturate else scaled, fmt, in_place=False)
    left = torch.where(values != 0, codes, 0.0) if may_zeros_change else codes
    # Divided before it is squared: for a value far beyond the range, the square in units of the code is infinite.
    error = scaled.sub_(codes).div_(scale).reshape(-1)
    statistics = CastStatistics(
        quantized=torch.full((), values.numel(), dtype=torch.int64, device=values.device),
        saturated=saturated,
        underflowed=_count_nonzero(values) - _count_nonzero(left),
        nonfinite=nonfinite,
        squared_error=torch.dot(error, error),
        squared_values=squared_values,
    )
    return codes, statistics


def _count_nonzero(values: torch.Tensor) -> torch.Tensor:
    """0-D int64; NaN counts as non-zero. On a CPU by numpy, which is four times as fast."""
    if values.device.type != "cpu":
        return torch.count_nonzero(values)
    return torch.tensor(int(np.count_nonzero(values.bool().numpy())), device="cpu")
