"""The rule by which the kernels count an FP8 cast: how an element is judged, and how counters add up.

Device functions of all counting kernels: `kernels`, `what_if_kernels`, and those of single casts in
`fp8watch.capture.te`. What an element counts as is said here alone, so all of them count the same, which is what
`count_by_torch` counts. Importing this needs Triton.

A thread takes a unit of adjacent elements, the last axis of a block, and keeps one counter per unit, not one per
element: registers limit the number of loads in flight. Counters are float32, in which a count takes two instructions,
one less than as int32, and is exact up to 2^24: that many elements a thread are 10^12 of a tensor.

Counters are passed one by one, because Triton 3.2 has no tuples among the variables of a loop. Each kernel adds to its
counters itself: in which order sums and additions follow each other decides how the compiler uses registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_finite(x):  # type: ignore[no-untyped-def]
    """Not NaN, nor infinite."""
    # NaN is not less either. Compared with the largest number, because LLVM makes three instructions of infinity.
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def not_zero(x):  # type: ignore[no-untyped-def]
    """1.0 for each element that is not zero (NaN is not), else 0.0."""
    return tl.where(x != 0.0, 1.0, 0.0)


@triton.jit
def kept(scale, after, before):  # type: ignore[no-untyped-def]
    """The count after a cast of which there are no codes: nothing becomes zero by a scale that is not finite."""
    return tl.where(is_finite(scale), after, before)


@triton.jit
def deviation(scaled, code, inverse):  # type: ignore[no-untyped-def]
    """Per element: the source less what is read back from its code. Arguments as in `tally`."""
    return (scaled - code) * inverse


@triton.jit  # type: ignore[untyped-decorator]
def tally(  # type: ignore[no-untyped-def]
    x, scaled, code, inverse, FP8_MAX: tl.constexpr, ZEROS_STAY: tl.constexpr = False
):  # fmt: skip
    """Per element: saturated, not zero before, not zero before and after, not finite, squared error, square (float32).

    `scaled`: `x` times the scale; `code`: the value of its code; `inverse`: of the scale.
    A scale that is NaN or infinite makes NaN of zeros, and of what lanes past a tensor's end have in place of elements.
    ZEROS_STAY: the scale is finite and `code` made with it, or the caller corrects the third count by `kept`.
    """
    saturated = (tl.abs(scaled) > FP8_MAX).to(tl.float32)
    before = not_zero(x)
    after = tl.where(code != 0.0, 1.0, 0.0)
    if not ZEROS_STAY:
        after *= before
    nonfinite = (~is_finite(x)).to(tl.float32)
    error = deviation(scaled, code, inverse)
    return saturated, before, after, nonfinite, error * error, x * x


@triton.jit  # type: ignore[untyped-decorator]
def nothing(UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counters [units] for the six figures of `tally`, before the first element."""
    none = tl.zeros([UNITS], tl.float32)
    return none, none, none, none, none, none


@triton.jit  # type: ignore[untyped-decorator]
def total(counter, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's count from its counters, as int32: the sum may be more than float32 holds exactly.

    AXIS: 0 for counters [units]; None, which compiles to another reduction, for those of more axes.
    """
    return tl.sum(counter.to(tl.int32), AXIS)


@triton.jit  # type: ignore[untyped-decorator]
def largest(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """amax along an axis: NaN is ignored, infinity is not; 0 where all are NaN."""
    found = tl.max(tl.abs(x), AXIS)  # not NaN, unless all are
    return tl.where(found != found, 0.0, found)
