"""Quantized tensors: the attributes of TE's storages, and the arithmetic of its recipes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

MAX = {"kFloat8E4M3": 448.0, "kFloat8E5M2": 57344.0}
DTYPE = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


class Float8CurrentScalingQuantizer:
    pass


class Float8Quantizer:
    """Delayed scaling's."""


@dataclass(eq=False)
class Float8TensorStorage:
    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _fp8_dtype: str = "DType.kFloat8E4M3"
    _quantizer: object = field(default_factory=Float8CurrentScalingQuantizer)


@dataclass(eq=False)
class Float8BlockwiseQTensorStorage:
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None = None
    _columnwise_scale_inv: torch.Tensor | None = None
    _fp8_dtype: str = "DType.kFloat8E4M3"
    _quantizer: object = None


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
    """Current scaling, or with `block` one scale a `block` neighbours of a row."""
    fp8_max = MAX[fmt]
    if block is None:
        amax = torch.nan_to_num(x.abs(), nan=0.0, posinf=torch.inf).max()
        scale = scale_of(amax, fp8_max)
        data = (x * scale).clamp(-fp8_max, fp8_max).to(DTYPE[fmt])
        return Float8TensorStorage(data, scale.reciprocal().reshape(1), f"DType.{fmt}")
    rows = x.reshape(x.shape[0], -1, block)
    scale = scale_of(rows.abs().amax(-1), fp8_max)
    data = (rows * scale.unsqueeze(-1)).clamp(-fp8_max, fp8_max).to(DTYPE[fmt]).view(x.shape)
    return Float8BlockwiseQTensorStorage(data, scale.reciprocal(), _fp8_dtype=f"DType.{fmt}")


def dequantize(x: object) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, Float8TensorStorage):
        return x._data.float() * x._scale_inv
    rows = x._rowwise_data.float()
    blocks = rows.view(rows.shape[0], x._rowwise_scale_inv.shape[1], -1)
    return (blocks * x._rowwise_scale_inv.unsqueeze(-1)).view(rows.shape)
