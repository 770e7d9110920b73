"""Element counts of one cast, from the source tensor and the scale it was cast with.

On a GPU a fused Triton kernel counts many tensors per launch. Elsewhere, and without Triton, the torch code of
`fp8watch.emulation.statistics` counts, with exactly the same counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8watch.emulation.cast import measure_amax
from fp8watch.emulation.statistics import CastStatistics, quantize_and_count
from fp8watch.formats import FORMATS, Fp8Format

logger = logging.getLogger(__name__)

COUNTS = ("quantized", "saturated", "underflowed", "nonfinite")
"""The counts in a step frame, in order."""

_FORMAT_OF_DTYPE = {getattr(torch, fmt.torch_dtype): fmt for fmt in FORMATS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """All 0-D tensors on the tensor's device: counts int64, the rest float32."""

    quantized: torch.Tensor
    """Number of elements."""
    saturated: torch.Tensor
    """Magnitude above the format's maximum after scaling (infinity included)."""
    underflowed: torch.Tensor
    """Not zero before, zero after."""
    zeros: torch.Tensor
    """Zero before."""
    nonfinite: torch.Tensor
    """NaN or infinite before. amax hides NaN; this does not."""
    squared_error: torch.Tensor
    """Sum of the squared differences between the values and their dequantized codes."""
    squared_values: torch.Tensor
    """Sum of the squared values."""
    amax: torch.Tensor
    """Largest magnitude, NaN ignored."""

    @property
    def mse(self) -> torch.Tensor:
        """Mean squared error of the cast."""
        return self.squared_error / self.quantized.clamp(min=1)

    @property
    def snr(self) -> torch.Tensor:
        """Signal-to-noise ratio in dB; infinite for a cast without error, NaN for a tensor of zeros."""
        return 10.0 * torch.log10(self.squared_values / self.squared_error)

    @property
    def crest(self) -> torch.Tensor:
        """amax over RMS; NaN for a tensor of zeros."""
        return self.amax / torch.sqrt(self.squared_values / self.quantized.clamp(min=1))


def format_of(dtype: torch.dtype | Fp8Format) -> Fp8Format:
    """The format of an FP8 dtype. Raises `KeyError` for another dtype."""
    return dtype if isinstance(dtype, Fp8Format) else _FORMAT_OF_DTYPE[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A tensor that is or would be cast."""

    values: torch.Tensor
    """The source, any float dtype and shape."""
    scale: torch.Tensor
    """float32: one element, or broadcasting over `values` (one per row or column)."""
    fmt: Fp8Format
    codes: torch.Tensor | None = None
    """The codes that the cast really made, FP8 or uint8 of the same shape; None: cast with saturation, ties to even."""


def count(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype | Fp8Format) -> TensorStatistics:
    """Statistics of one tensor, cast to `dtype` with `scale`."""
    return count_many([Item(values=values, scale=scale, fmt=format_of(dtype))])[0]


def count_many(items: Sequence[Item]) -> list[TensorStatistics]:
    """Statistics of many tensors; on a GPU one launch per kind (dtype, format, layout of the scale)."""
    kernels: Any = _kernels() if any(item.values.device.type == "cuda" for item in items) else None
    fused: dict[int, TensorStatistics] = kernels.count_fused(items) if kernels is not None else {}
    return [fused[i] if i in fused else count_by_torch(item) for i, item in enumerate(items)]


def count_by_torch(item: Item) -> TensorStatistics:
    """The reference: a few passes of torch operations over a float32 copy."""
    values, scale = local(item.values), local(item.scale).float()
    scale = scale.reshape(()) if scale.numel() == 1 else scale
    values = values if values.is_floating_point() else values.float()
    amax = measure_amax(values)
    if item.codes is None:
        cast = quantize_and_count(values, scale, item.fmt, amax)[1]
    else:
        cast = count_made(values, scale, item.fmt, local(item.codes))
    return TensorStatistics(
        quantized=cast.quantized,
        saturated=cast.saturated,
        underflowed=cast.underflowed,
        zeros=cast.quantized - torch.count_nonzero(values),
        nonfinite=cast.nonfinite,
        squared_error=cast.squared_error,
        squared_values=cast.squared_values,
        amax=amax,
    )


def count_made(values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, codes: torch.Tensor) -> CastStatistics:
    """Statistics of a cast made elsewhere; `codes` are its FP8 bytes."""
    values = values.float()
    made = codes.view(getattr(torch, fmt.torch_dtype)).float()
    scaled = values * scale
    error = ((scaled - made) / scale).reshape(-1)
    return CastStatistics(
        quantized=torch.full((), values.numel(), dtype=torch.int64, device=values.device),
        saturated=torch.count_nonzero(scaled.abs() > fmt.max),
        underflowed=torch.count_nonzero((values != 0) & (made == 0)),
        nonfinite=torch.count_nonzero(~torch.isfinite(values)),
        squared_error=torch.dot(error, error),
        squared_values=values.square().sum(),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached; of a DTensor this rank's part."""
    tensor = tensor.detach()
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


_loaded: list[Any] = []


def _kernels() -> Any:
    """The Triton module, or None if Triton cannot be imported (logged once)."""
    if not _loaded:
        try:
            from fp8watch.capture.statistics import kernels
        except ImportError as error:
            logger.info("FP8 statistics are counted by torch: %s", error)
            _loaded.append(None)
        else:
            _loaded.append(kernels)
    return _loaded[0]
