"""Rounds to FP8 and measures amax, with the semantics of Transformer Engine's cast kernels.

A cast saturates (+-inf becomes +-max), keeps NaN, and rounds to nearest, ties to even. amax ignores NaN and keeps
infinity (`fmaxf`). Results are FP32 tensors that hold FP8 values exactly, because on a CPU torch's conversion from
float8 back to float32 alone takes five times as long as the arithmetic below. `to_float8` makes real float8 tensors;
tests prove both equal for every value.
"""

from __future__ import annotations

import torch

from fp8watch.formats import Fp8Format

_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 23


def measure_amax(values: torch.Tensor) -> torch.Tensor:
    """Largest magnitude as a 0-D float32 tensor. NaN is ignored, infinity is kept; 0 for an empty tensor."""
    values = values.detach()
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=values.device)
    low, high = torch.aminmax(values)
    amax = torch.maximum(high, -low).float()
    if values.device.type != "cpu":  # aminmax propagates NaN; compute both, because reading the value would wait
        return torch.where(amax.isnan(), _amax_without_nan(values), amax)
    return _amax_without_nan(values) if torch.isnan(amax) else amax


def _amax_without_nan(values: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(values.abs().float(), nan=0.0, posinf=torch.inf).max()


def round_to_fp8(scaled: torch.Tensor, fmt: Fp8Format, *, in_place: bool) -> torch.Tensor:
    """Round float32 values of magnitude <= `fmt.max` (or NaN) to the format.

    Adding and subtracting 1.5 * 2^(23 - mantissa_bits) * 2^exponent makes the FP32 adder round to the format's
    spacing, ties to even; below the smallest normal the spacing is that of the subnormals. A negative value that
    rounds to zero becomes +0, which makes no difference to a GEMM.
    """
    magic = (scaled.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    magic.clamp_(min=fmt.min_normal).mul_(1.5 * 2.0 ** (_MANTISSA_BITS - fmt.mantissa_bits))
    return (scaled.add_(magic) if in_place else scaled + magic).sub_(magic)


def quantize(values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """`values * scale`, clamped and rounded: a float32 tensor of the same shape that holds FP8 values.

    `scale` is a 0-D float32 tensor; divide by it to dequantize.
    """
    scaled = values.float() * scale
    return round_to_fp8(scaled.clamp_(-fmt.max, fmt.max), fmt, in_place=True)


def to_float8(values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """The same cast to torch's float8 dtype. Clamps first, because torch turns 7e4 into infinity in E5M2."""
    scaled = (values.float() * scale).clamp_(-fmt.max, fmt.max)
    return scaled.to(getattr(torch, fmt.torch_dtype))
