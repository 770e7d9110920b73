"""Counts one cast when it happens, on a GPU: one launch, no table, no copy, nothing allocated on the host.

Each program of a launch adds to its own place in the buffers, so micro-batches add up without atomics and the result
is reproducible. Importing this needs Triton. Elements count as `fp8watch.capture.statistics.tally` says, as in the
kernel that counts many tensors in one launch; here tensors come one by one and are soon freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp8watch.capture.statistics import tally
from fp8watch.capture.statistics.kernels import CODES_OF, SOURCES
from fp8watch.capture.te.cast_launch import ALIGNMENT, LARGE
from fp8watch.capture.te.cast_rows import CastRow
from fp8watch.capture.triton_launch import Shortcut, is_hooked, shortcut
from fp8watch.formats import Fp8Format

THREADS, EACH = 256, 16
"""Threads of a program, and adjacent elements that each of them takes at once: two loads of 16 bytes from a BF16
source, one from the bytes."""
PROGRAMS = 528
"""Programs per launch: with at most 64 registers a thread, four at once for each of the 132 multiprocessors of an H100
or H200. 1,680 tensors x 528 places x 24 bytes are 20 MiB."""
DEVICE = "cuda"
"""Type of device that the kernel runs on; another one with Triton's interpreter."""


class _Launch(NamedTuple):
    """A compiled kernel: a call through `triton.jit` takes several times as long."""

    run: Callable[..., object]
    """With its grid."""
    constants: tuple[Any, ...]
    shortcut: Shortcut | None


_launches: dict[tuple[Any, ...], _Launch] = {}


@triton.jit
def scale_of(inverse):  # type: ignore[no-untyped-def]
    """The scale of a cast from its inverse, as `tensors.scale_of` has it."""
    scale = tl.math.div_rn(1.0, inverse)  # `/` may be a unit in the last place off, and torch divides exactly
    return tl.where((scale > 3.4028234663852886e38) & (inverse > 0.0), 3.4028234663852886e38, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _counted(  # type: ignore[no-untyped-def]
    saturated, before, after, nonfinite, error, square, x, code, scale, inverse, FP8_MAX: tl.constexpr
):  # fmt: skip
    """The counters [threads] after elements `x` [threads, each], whose codes have the values `code`."""
    s, b, a, n, e, q = tally.tally(x, x * scale, code, inverse, FP8_MAX)
    s, b, a, n, e, q = tl.sum(s, 1), tl.sum(b, 1), tl.sum(a, 1), tl.sum(n, 1), tl.sum(e, 1), tl.sum(q, 1)
    return saturated + s, before + b, after + a, nonfinite + n, error + e, square + q


@triton.jit
def add_to_totals(counts, sums, program, saturated, before, after, nonfinite, error, square):  # type: ignore[no-untyped-def]
    """Add a program's counters, one of each a thread (float32), to its place in a row."""
    place = counts + program * 4
    tl.store(place, tl.load(place) + tally.total(saturated, 0))
    tl.store(place + 1, tl.load(place + 1) + tally.total(before, 0))
    tl.store(place + 2, tl.load(place + 2) + tally.total(after, 0))
    tl.store(place + 3, tl.load(place + 3) + tally.total(nonfinite, 0))
    place = sums + program * 2
    tl.store(place, tl.load(place) + tl.sum(error, 0))
    tl.store(place + 1, tl.load(place + 1) + tl.sum(square, 0))


# Specialising on the address of the scale (one element anywhere in a vector) or on the number of elements gains
# nothing; with fewer kinds of kernels the right one is found at once.
@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["inverse_at"])  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    source, codes, inverse_at, counts, sums, numel,
    CODES: tl.constexpr, FP8_MAX: tl.constexpr, THREADS: tl.constexpr, EACH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = THREADS * EACH
    program = tl.program_id(0)
    start = program.to(tl.int64) * BLOCK
    if start >= numel:
        return
    inverse = tl.load(inverse_at)
    scale = scale_of(inverse)
    saturated, before, after, nonfinite, error, square = tally.nothing(THREADS)
    within = tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    while start + BLOCK <= numel:  # without a mask, which would take one load for every element
        x = tl.load(source + start + within).to(tl.float32)
        code = tl.load(codes + start + within).to(CODES, bitcast=True).to(tl.float32)
        saturated, before, after, nonfinite, error, square = _counted(
            saturated, before, after, nonfinite, error, square, x, code, scale, inverse, FP8_MAX
        )  # fmt: skip
        start += PROGRAMS * BLOCK
    if start < numel:
        inside = start + within < numel
        x = tl.load(source + start + within, mask=inside, other=0.0).to(tl.float32)
        code = tl.load(codes + start + within, mask=inside, other=0).to(CODES, bitcast=True).to(tl.float32)
        saturated, before, after, nonfinite, error, square = _counted(
            saturated, before, after, nonfinite, error, square, x, code, scale, inverse, FP8_MAX
        )  # fmt: skip
    add_to_totals(counts, sums, program, saturated, before, after, nonfinite, error, square)


def add(
    row: CastRow, values: torch.Tensor, codes: torch.Tensor, inverse: torch.Tensor, *, fmt: Fp8Format, code: Any = None
) -> bool:  # fmt: skip
    """Add a cast's statistics to a row's counts (int32 [PROGRAMS, 4]) and sums (float32 [PROGRAMS, 2]).

    `codes`: the bytes (uint8) that the cast made; `inverse`: one float32 element, the inverse of the scale.
    `code`: the framework's name for the format, by which the row's next cast is compared with this one; without it the
    next one is launched by this function too.
    False: the kernel cannot read tensors of this layout, and nothing was added.
    """
    numel = values.numel()
    if codes.numel() != numel or not (values.is_contiguous() and codes.is_contiguous()):
        return False
    device = values.get_device()
    if values.is_cuda and torch.cuda.current_device() != device:
        return False  # Triton launches on the current device
    values_at, codes_at = values.data_ptr(), codes.data_ptr()
    # Everything that Triton compiles a separate kernel for, except addresses that are not aligned for vector loads.
    kind = (device, values.dtype, fmt.name, numel < LARGE)
    known = None if (values_at | codes_at) % ALIGNMENT else _launches.get(kind)
    if known is None:
        if values.device.type != DEVICE or values.dtype not in SOURCES or fmt.name not in CODES_OF:
            return False
        known = _first_launch(row, values, codes, inverse, fmt)
        if known is None or (values_at | codes_at | row.counts_at | row.sums_at) % ALIGNMENT:
            return True
        _launches[kind] = known
    else:
        known.run(values_at, codes_at, inverse.data_ptr(), row.counts_at, row.sums_at, numel, *known.constants)
    if known.shortcut is not None and code is not None and numel < LARGE and not is_hooked():
        row.last = (known.shortcut, values.dtype, code)
    return True


def _first_launch(
    row: CastRow, values: torch.Tensor, codes: torch.Tensor, inverse: torch.Tensor, fmt: Fp8Format
) -> _Launch | None:
    """Launch through `triton.jit`, which compiles; None: what it returns cannot be launched again."""
    constants = (CODES_OF[fmt.name], fmt.max, THREADS, EACH, PROGRAMS)
    kernel: Any = _cast_kernel
    compiled = kernel[(PROGRAMS,)](
        values, codes, inverse, row.counts, row.sums, values.numel(), *constants, num_warps=THREADS // 32
    )  # fmt: skip
    if not hasattr(compiled, "packed_metadata"):
        return None
    short = shortcut(compiled, PROGRAMS, values.get_device())
    return _Launch(compiled[(PROGRAMS, 1, 1)], constants, short)
