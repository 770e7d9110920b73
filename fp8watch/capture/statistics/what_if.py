"""Counts what a tensor would lose under other recipes: all candidates of `fp8watch.what_if` at once.

On a GPU this takes one pass of a fused Triton kernel over each tensor, any number of tensors per launch. Elsewhere, and
for layouts that the kernel cannot take, the torch code below counts, with exactly the same counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8watch.capture.statistics.count import Item, local
from fp8watch.emulation.cast import measure_amax
from fp8watch.emulation.statistics import quantize_and_count
from fp8watch.formats import E4M3, Fp8Format
from fp8watch.what_if import CANDIDATES, MARGIN_OF, TILE

logger = logging.getLogger(__name__)

_MANTISSA_BITS, _BIAS = 23, 127


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfStatistics:
    """Figures of one tensor, on its device; element i of each 1-D tensor [5] is candidate i of `CANDIDATES`."""

    underflowed: torch.Tensor
    """int64 [5]: not zero before, zero after."""
    saturated: torch.Tensor
    """int64 [5]: magnitude above the format's maximum after scaling (infinity included)."""
    squared_error: torch.Tensor
    """float32 [5]: sum of the squared differences between the values and their dequantized codes."""
    squared_values: torch.Tensor
    """float32, 0-D: sum of the squared values."""

    @property
    def snr(self) -> torch.Tensor:
        """float32 [5], dB; infinite for a cast without error, NaN for a tensor of zeros."""
        return 10.0 * torch.log10(self.squared_values / self.squared_error)


def what_if(item: Item, amax: torch.Tensor | None = None) -> WhatIfStatistics:
    """Figures of one tensor. A known `amax` (0-D float32) saves a pass."""
    return what_if_many([item], [amax])[0]


def what_if_many(items: Sequence[Item], amaxes: Sequence[torch.Tensor | None] | None = None) -> list[WhatIfStatistics]:
    """Figures of many tensors; on a GPU one launch per kind (dtype, format, layout of the scale).

    The items' codes are ignored.
    """
    known = [None] * len(items) if amaxes is None else list(amaxes)
    largest = [_amax(local(i.values)) if a is None else a for i, a in zip(items, known, strict=True)]
    kernels: Any = _kernels() if any(item.values.device.type == "cuda" for item in items) else None
    fused: dict[int, WhatIfStatistics] = kernels.what_if_fused(items, largest) if kernels is not None else {}
    return [fused[i] if i in fused else what_if_by_torch(items[i], largest[i]) for i in range(len(items))]


def _amax(values: torch.Tensor) -> torch.Tensor:
    """Like `measure_amax`, which would make a float32 copy of the tensor on a GPU."""
    if values.device.type == "cpu" or not values.numel() or not values.is_floating_point():
        return measure_amax(values)
    low, high = torch.aminmax(torch.nan_to_num(values, nan=0.0, posinf=torch.inf, neginf=-torch.inf))
    return torch.maximum(high, -low).float()


def what_if_by_torch(item: Item, amax: torch.Tensor) -> WhatIfStatistics:
    """The reference: a few passes of torch operations per candidate."""
    values, scale = local(item.values), local(item.scale).float()
    if not values.numel():
        zeros = torch.zeros(len(CANDIDATES), dtype=torch.float32, device=values.device)
        none = zeros.to(torch.int64)
        return WhatIfStatistics(underflowed=none, saturated=none, squared_error=zeros, squared_values=zeros[0])
    scale = scale.reshape(()) if scale.numel() == 1 else scale
    results = []
    for name in CANDIDATES:
        if name in TILE:
            tiles = _tiles(values, TILE[name])
            results.append(quantize_and_count(tiles, tile_scale(tiles), E4M3, amax)[1])
        elif name in MARGIN_OF:
            results.append(quantize_and_count(values, scale * 2.0 ** -MARGIN_OF[name], item.fmt, amax)[1])
        else:
            results.append(quantize_and_count(values, current_scale(amax, item.fmt), item.fmt, amax)[1])
    return WhatIfStatistics(
        underflowed=torch.stack([cast.underflowed for cast in results]),
        saturated=torch.stack([cast.saturated for cast in results]),
        squared_error=torch.stack([cast.squared_error for cast in results]),
        squared_values=results[0].squared_values,
    )


def current_scale(amax: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """float32 of amax's shape: fp8_max / amax, or exactly 1 where that is not usable, as in Transformer Engine
    (`common/recipe/recipe_common.cuh`)."""
    scale = torch.full_like(amax, fmt.max, dtype=torch.float32).div_(amax)
    return torch.where((amax > 0) & torch.isfinite(amax) & torch.isfinite(scale), scale, 1.0)


def tile_scale(tiles: torch.Tensor) -> torch.Tensor:
    """[..., tile] -> float32 [..., 1]: fp8_max of E4M3 over the tile's amax, rounded down to a power of two.

    Computed from the bits of amax, without a division that could round: for amax = m 2^e the power is 8 - e if
    m <= 1.75, else 7 - e (448 = 1.75 * 2^8). NaN is ignored; 1 for a tile of zeros or with an infinity.
    """
    amax = torch.nan_to_num(tiles.float().abs(), nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)
    bits = amax.view(torch.int32)
    exponent = bits >> _MANTISSA_BITS  # biased
    is_above = (bits & 0x7FFFFF) > 0x600000
    power = (2 * _BIAS + 8 - exponent - is_above.to(torch.int32)).clamp(1, 2 * _BIAS)
    scale = (power << _MANTISSA_BITS).view(torch.float32)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0)


def _tiles(values: torch.Tensor, length: int) -> torch.Tensor:
    """[..., n] -> [..., ceil(n / length), length], the last tile of a row padded with zeros."""
    values = values.reshape(1, -1) if values.dim() < 2 else values
    short = -values.shape[-1] % length
    padded = torch.nn.functional.pad(values, (0, short)) if short else values
    return padded.reshape(*values.shape[:-1], padded.shape[-1] // length, length)


_loaded: list[Any] = []


def _kernels() -> Any:
    """The Triton module, or None if Triton cannot be imported (logged once)."""
    if not _loaded:
        try:
            from fp8watch.capture.statistics import what_if_kernels
        except ImportError as error:
            logger.info("what-if figures are counted by torch: %s", error)
            _loaded.append(None)
        else:
            _loaded.append(what_if_kernels)
    return _loaded[0]
