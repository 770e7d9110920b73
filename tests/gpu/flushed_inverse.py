"""Lets the interpreter take subnormals for zero where a GPU's instruction for inverses does."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8watch.capture.statistics import kernels


@triton.jit
def flushed(x):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(x) < 1.1754943508222875e-38, 0.0, x)


@triton.jit
def four_over(scale, HAS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    return flushed(1.0 / flushed(scale * 0.25))


def flush() -> None:
    """In place of the division that the interpreter has for this."""
    kernels.four_over = four_over
