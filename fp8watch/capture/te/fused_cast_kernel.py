"""Counts a cast that a norm or an activation makes inside, on a GPU: its source is computed again in registers.

Transformer Engine writes the FP8 result only, so a source in memory would take a second call of its function: two more
passes over the elements, and memory for the largest activations of a model in high precision, which a training close
to its limit does not have. Importing this needs Triton. The formulas are those of TE 2.20 `common/util/math.h`
and `common/normalization`, in float32 as there; `fp8watch.capture.te.fused_casts` tries out each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fp8watch.capture.statistics import tally
from fp8watch.capture.statistics.kernels import CODES_OF, SOURCES
from fp8watch.capture.te.cast_kernel import EACH, PROGRAMS, THREADS, add_to_totals, scale_of
from fp8watch.formats import Fp8Format

__all__ = ["EACH", "SOURCES", "constants", "launch"]


@triton.jit
def _tanh_of_gelu(x):  # type: ignore[no-untyped-def]
    # By way of the sigmoid, yet rounded as a tanh is: where that is -1, the activation is exactly zero.
    return 2.0 * tl.sigmoid(2.0 * x * (0.79788456 + 0.03567741 * x * x)) - 1.0


@triton.jit  # type: ignore[untyped-decorator]
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "sigmoid":
        y = tl.sigmoid(x)
    elif ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "qgelu":
        y = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "gelu":
        y = x * (0.5 + 0.5 * _tanh_of_gelu(x))
    elif ACTIVATION == "relu":
        y = tl.where(x > 0.0, x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "srelu")
        y = tl.where(x > 0.0, x * x, 0.0)
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _derivative(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "sigmoid":
        s = tl.sigmoid(x)
        y = s * (1.0 - s)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        y = s + x * s * (1.0 - s)
    elif ACTIVATION == "qgelu":
        s = tl.sigmoid(1.702 * x)
        y = s + 1.702 * x * s * (1.0 - s)
    elif ACTIVATION == "gelu":
        t = _tanh_of_gelu(x)
        y = 0.5 * x * ((1.0 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1.0 + t)
    elif ACTIVATION == "relu":
        y = tl.where(x > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(ACTIVATION == "srelu")
        y = tl.where(x > 0.0, 2.0 * x, 0.0)
    return y


@triton.jit
def _load(pointer, offsets, inside):  # type: ignore[no-untyped-def]
    return tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)


# `numel` and `width` are multiples of EACH, so a thread's elements lie in one row and are all inside or all outside.
@triton.jit(do_not_specialize_on_alignment=["inverse_at", "mean", "spread"])  # type: ignore[untyped-decorator]
def _fused_kernel(  # type: ignore[no-untyped-def]
    first, second, third, mean, spread, codes, inverse_at, counts, sums, numel, width,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr, IS_ZERO_CENTERED: tl.constexpr, CODES: tl.constexpr,
    FP8_MAX: tl.constexpr, THREADS: tl.constexpr, EACH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = THREADS * EACH
    program = tl.program_id(0)
    start = program * BLOCK
    if start >= numel:
        return
    inverse = tl.load(inverse_at)
    scale = scale_of(inverse)
    saturated, before, after, nonfinite, error, square = tally.nothing(THREADS)
    each = tl.arange(0, EACH)[None, :]
    while start < numel:
        unit = (start + tl.arange(0, THREADS) * EACH)[:, None]
        inside = unit < numel
        row = unit // width
        column = unit - row * width
        if FORM == "layernorm" or FORM == "rmsnorm":
            x = _load(first, unit + each, inside)
            gamma = _load(second, column + each, inside)
            if IS_ZERO_CENTERED:
                gamma += 1.0
            if FORM == "layernorm":
                x -= tl.load(mean + row, mask=inside, other=0.0)
            x = x * tl.load(spread + row, mask=inside, other=0.0) * gamma
            if FORM == "layernorm":
                x += _load(third, column + each, inside)
        elif FORM == "activation":
            x = _activated(_load(first, unit + each, inside), ACTIVATION)
        elif FORM == "derivative":
            x = _load(first, unit + each, inside) * _derivative(_load(second, unit + each, inside), ACTIVATION)
        elif FORM == "gated":
            place = unit + row * width + each
            x = _activated(_load(first, place, inside), ACTIVATION) * _load(first, place + width, inside)
        else:
            tl.static_assert(FORM == "gated_derivative")
            half = width // 2
            is_second = column >= half
            within = column - tl.where(is_second, half, 0)
            place = row * width + within + each
            gradient = _load(first, row * half + within + each, inside)
            gate, up = _load(second, place, inside), _load(second, place + half, inside)
            x = gradient * tl.where(is_second, _activated(gate, ACTIVATION), up * _derivative(gate, ACTIVATION))
        # Outside, `x` may be anything: beyond the last element a norm's row has no mean.
        x = tl.where(inside, x, 0.0)
        code = tl.load(codes + unit + each, mask=inside, other=0).to(CODES, bitcast=True).to(tl.float32)
        s, b, a, n, e, q = tally.tally(x, x * scale, code, inverse, FP8_MAX)
        saturated += tl.sum(s, 1)
        before += tl.sum(b, 1)
        after += tl.sum(a, 1)
        nonfinite += tl.sum(n, 1)
        error += tl.sum(e, 1)
        square += tl.sum(q, 1)
        start += PROGRAMS * BLOCK
    add_to_totals(counts, sums, program, saturated, before, after, nonfinite, error, square)


def constants(form: str, activation: str, fmt: Fp8Format, *, is_zero_centered: bool) -> tuple[Any, ...]:
    """The kernel's compile-time arguments."""
    return (form, activation, is_zero_centered, CODES_OF[fmt.name], fmt.max, THREADS, EACH, PROGRAMS)


def launch(tensors: tuple[torch.Tensor, ...], numel: int, width: int, constant: tuple[Any, ...]) -> Any:
    """Launch through `triton.jit`, which compiles, and return the compiled kernel.

    `tensors`: those of the kernel, in its order.
    """
    kernel: Any = _fused_kernel
    return kernel[(PROGRAMS,)](*tensors, numel, width, *constant, num_warps=THREADS // 32)
