"""Quantized tensors with the attributes of TE's storages and the arithmetic of its recipes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch


class DType(enum.IntEnum):
    """Numbers, names and the `str` of TE 2.20's: a number."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


MAX = {"kFloat8E4M3": 448.0, "kFloat8E5M2": 57344.0}
DTYPE = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


class Float8CurrentScalingQuantizer:
    pass


class Float8Quantizer:
    """Delayed scaling's."""


@dataclass
class Float8BlockQuantizer:
    block_len: int = 128


@dataclass(eq=False)
class Float8TensorStorage:
    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _fp8_dtype: DType = DType.kFloat8E4M3
    _quantizer: object = field(default_factory=Float8CurrentScalingQuantizer)


@dataclass(eq=False)
class Float8BlockwiseQTensorStorage:
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None = None
    _columnwise_scale_inv: torch.Tensor | None = None
    _fp8_dtype: DType = DType.kFloat8E4M3
    _quantizer: object = None
    _is_2D_scaled: bool = False


@dataclass(eq=False)
class MXFP8TensorStorage(Float8BlockwiseQTensorStorage):
    """Scales uint8 (E8M0), padded with zeros."""


@dataclass(eq=False)
class NVFP4TensorStorage:
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _amax_rowwise: torch.Tensor | None
    _columnwise_data: torch.Tensor | None = None
    _columnwise_scale_inv: torch.Tensor | None = None
    _amax_columnwise: torch.Tensor | None = None
    _fp4_dtype: str = "DType.kFloat4E2M1"


def scale_of(amax: torch.Tensor, fp8_max: float) -> torch.Tensor:
    """`compute_scale_from_amax`: exactly 1 where amax is 0, infinite or NaN."""
    scale = fp8_max / amax
    return torch.where((amax == 0) | ~torch.isfinite(amax) | ~torch.isfinite(scale), 1.0, scale)


def quantize(x: torch.Tensor, fmt: str = "kFloat8E4M3", block: int | None = None) -> object:
    """Current scaling, or with `block` one scale a `block` neighbours of a row, in TE's layout: [blocks, rows], padded
    to a multiple of 4 with what happens to lie there."""
    fp8_max = MAX[fmt]
    if block is None:
        if not x.numel():  # no kernel runs, so its scale is what happens to lie there
            return Float8TensorStorage(x.to(DTYPE[fmt]), torch.full((1,), 1e-30), DType[fmt])
        amax = torch.nan_to_num(x.abs(), nan=0.0, posinf=torch.inf).max()
        scale = scale_of(amax, fp8_max)
        data = (x * scale).clamp(-fp8_max, fp8_max).to(DTYPE[fmt])
        return Float8TensorStorage(data, scale.reciprocal().reshape(1), DType[fmt])
    rows = x.reshape(x.shape[0], x.shape[1] // block, block)
    scale = scale_of(rows.abs().amax(-1), fp8_max)
    data = (rows * scale.unsqueeze(-1)).clamp(-fp8_max, fp8_max).to(DTYPE[fmt]).view(x.shape)
    inverse = torch.nn.functional.pad(scale.reciprocal().t(), (0, -len(x) % 4), value=1e9).contiguous()
    return Float8BlockwiseQTensorStorage(
        data, inverse, _fp8_dtype=DType[fmt], _quantizer=Float8BlockQuantizer(block)
    )  # fmt: skip


def dequantize(x: object) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, Float8TensorStorage):
        return x._data.float() * x._scale_inv
    rows = x._rowwise_data.float()
    inverse = x._rowwise_scale_inv[:, : len(rows)].t()
    blocks = rows.view(len(rows), inverse.shape[1], rows.shape[1] // inverse.shape[1])
    return (blocks * inverse.unsqueeze(-1)).view(rows.shape)
