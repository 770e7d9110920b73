"""Reads scales from Transformer Engine's quantized tensors: from attributes of one object to amax and scale.

Stateless recipes leave their scales in the tensors they make (TE 2.20 `pytorch/tensor/storage/*.py`):

| recipe | class | what is read |
| --- | --- | --- |
| current, delayed | `Float8TensorStorage` | `_scale_inv`, float32 [1] |
| block | `Float8BlockwiseQTensorStorage` | `_rowwise_scale_inv`, `_columnwise_scale_inv`, float32 |
| MXFP8 | `MXFP8TensorStorage` | the same names, uint8 E8M0: 2^(byte - 127), 0 padding, 255 NaN |
| NVFP4 | `NVFP4TensorStorage` | `_amax_rowwise`, `_amax_columnwise`, float32 |

The columnwise array is used if there is no rowwise one. Of a block format the worst block is taken: the one with the
largest amax, hence the smallest scale. With power-of-two scales (MXFP8 always, block by default) amax is known only to
a factor of two, and its upper bound is given.

TE makes a scale of exactly 1 if amax is 0, infinite or NaN (`common/recipe/recipe_common.cuh`), so a scale of 1 says
nothing about amax and is left out. Tests read objects of these layouts on the CPU; current and block scaling are tested
on a GPU; the readers of MXFP8 and NVFP4 have not been run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fp8watch.formats import E4M3, E5M2

UNKNOWN_SCALE = 1.0
"""See the module's docstring."""
_E8M0_BIAS, _E8M0_NAN = 127, 255
_SCALES = ("_rowwise_scale_inv", "_columnwise_scale_inv")
_DATA = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")

Kind = Literal["current", "block", "mxfp8", "nvfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScales:
    """The scales of one quantized tensor, read without synchronisation."""

    recipe: Kind
    """`current` also for a tensor quantized with delayed scaling."""
    fp8_format: str
    """Key of `fp8watch.formats.FORMATS`; for NVFP4 the format of its block scales."""
    worst: torch.Tensor
    """0-D float32: 1 / scale of the worst block, 0 if unknown, NaN if any block's scale is; for NVFP4 the amax."""

    @property
    def fp8_max(self) -> float:
        """Largest magnitude of the format."""
        return (E5M2 if self.fp8_format == "e5m2" else E4M3).max

    @property
    def amax(self) -> torch.Tensor:
        """0-D float32; 0 if unknown."""
        return self.worst if self.recipe == "nvfp4" else self.worst * self.fp8_max

    @property
    def scale(self) -> torch.Tensor | None:
        """0-D float32, infinite if unknown; None for NVFP4, whose scales have two levels."""
        return None if self.recipe == "nvfp4" else self.worst.reciprocal()


def scale_of(inverse: torch.Tensor) -> torch.Tensor:
    """float32, the scale of a cast from its `_scale_inv`.

    Transformer Engine's largest scale is the largest float32 (`common/recipe/recipe_common.cuh`), of whose inverse the
    inverse is infinite.
    """
    scale = inverse.reciprocal()
    return torch.where(inverse > 0, scale.clamp(max=torch.finfo(torch.float32).max), scale)


def format_name(dtype: Any) -> str:
    """Key of `fp8watch.formats.FORMATS` for a member of TE's dtype enumeration; E4M3 if it names no FP8 format.

    Since 2.20 that is a Python `IntEnum` (`pytorch/constants.py` 24), whose `str` is a number; before, one of pybind11.
    """
    return "e5m2" if "E5M2" in str(getattr(dtype, "name", dtype)) else "e4m3"


def is_delayed(tensor: Any) -> bool:
    """Whether the tensor was quantized with delayed scaling, which another source reads (`delayed`)."""
    return type(getattr(tensor, "_quantizer", None)).__name__ == "Float8Quantizer"


def scale_arrays(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensor's scale arrays. Their memory identifies a tensor that comes back in another wrapper."""
    for name in ("_scale_inv", *_SCALES):
        array = getattr(tensor, name, None)
        if isinstance(array, torch.Tensor) and array.numel():
            yield array


def is_empty(tensor: Any) -> bool:
    """Whether the tensor has no elements (an expert without tokens): its scales are memory that nobody wrote."""
    return any(isinstance(data := getattr(tensor, name, None), torch.Tensor) and not data.numel() for name in _DATA)


def read_scales(tensor: Any, *, raw: bool = False) -> TensorScales | None:
    """Scales of a quantized tensor (or storage); None for a plain tensor or an unknown layout.

    `raw` keeps scales of exactly 1 of formats with one scale per tensor, for a caller that removes them for many
    tensors at once.
    """
    fmt = format_name(getattr(tensor, "_fp8_dtype", None))
    per_tensor = getattr(tensor, "_scale_inv", None)
    if isinstance(per_tensor, torch.Tensor) and per_tensor.numel():
        worst = per_tensor.detach().reshape(-1)[0] if per_tensor.numel() == 1 else per_tensor.detach().amax()
        return TensorScales(recipe="current", fp8_format=fmt, worst=worst if raw else _without_unknown(worst))
    amax = _first(tensor, ("_amax_rowwise", "_amax_columnwise"))
    if amax is not None:
        return TensorScales(recipe="nvfp4", fp8_format="e4m3", worst=amax.amax().float())
    scales = _first(tensor, _SCALES)
    if scales is None:
        return None
    if scales.dtype == torch.uint8:
        return TensorScales(recipe="mxfp8", fp8_format=fmt, worst=_worst_e8m0(scales))
    if scales.is_floating_point():
        return TensorScales(recipe="block", fp8_format=fmt, worst=_without_unknown(_block_scales(tensor)).amax())
    return None


def scale_range(tensor: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Smallest and largest scale among the blocks (0-D float32), without padding and unknown ones.

    Both are infinite if no block has a known scale. None for NVFP4 and for plain tensors.
    """
    scales = _first(tensor, ("_scale_inv", *_SCALES))
    if scales is None or _first(tensor, ("_amax_rowwise", "_amax_columnwise")) is not None:
        return None
    if scales.dtype == torch.uint8:
        inverse = _from_e8m0(scales)
    else:
        inverse = scales.float() if hasattr(tensor, "_scale_inv") else _block_scales(tensor)
    is_known = (inverse != UNKNOWN_SCALE) & (inverse > 0)
    if scales.dtype == torch.uint8:
        is_known = inverse > 0  # 1 is a power of two like any other
    largest = torch.where(is_known, inverse, 0.0).amax().reciprocal()
    smallest = torch.where(is_known, inverse, torch.inf).amin()
    return largest, torch.where(smallest == torch.inf, torch.inf, smallest.reciprocal())


def _block_scales(tensor: Any) -> torch.Tensor:
    """float32: inverse scales of the blocks, without the padding to multiples of 4, which is uninitialised memory.

    TE 2.20 `tensor/float8_blockwise_tensor.py` 162. For stored data [rows, columns]: scales per 128 x 128 block in
    [blocks of rows, blocks of columns], padded; scales per 1 x 128 block in [blocks of columns, rows], padded.
    """
    for side in ("rowwise", "columnwise"):
        scales, data = getattr(tensor, f"_{side}_scale_inv", None), getattr(tensor, f"_{side}_data", None)
        if not isinstance(scales, torch.Tensor) or not scales.numel():
            continue
        scales = scales.detach().float()
        if not isinstance(data, torch.Tensor) or scales.dim() != 2 or not data.shape:
            return scales
        columns = data.shape[-1]
        rows = data.numel() // max(columns, 1)
        block = int(getattr(getattr(tensor, "_quantizer", None), "block_len", 128))
        used = -(-columns // block) if getattr(tensor, "_is_2D_scaled", False) else rows
        return scales[:, :used]
    raise AttributeError("no block scales")


def _first(tensor: Any, names: tuple[str, ...]) -> torch.Tensor | None:
    for name in names:
        array = getattr(tensor, name, None)
        if isinstance(array, torch.Tensor) and array.numel():
            return array.detach()
    return None


def _without_unknown(inverse: torch.Tensor) -> torch.Tensor:
    return torch.where(inverse == UNKNOWN_SCALE, 0.0, inverse)


def _worst_e8m0(scales: torch.Tensor) -> torch.Tensor:
    largest = scales.amax()
    return torch.where(largest == 0, 0.0, _from_e8m0(largest))


def _from_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """uint8 -> float32; 0 (padding, or a block of zeros) stays 0."""
    values = torch.exp2(scales.float() - _E8M0_BIAS)
    values = torch.where(scales == _E8M0_NAN, torch.nan, values)
    return torch.where(scales == 0, 0.0, values)
