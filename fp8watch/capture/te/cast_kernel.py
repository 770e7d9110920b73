"""Counts one cast when it happens, on a GPU: one launch, no table, no copy, nothing allocated on the host.

Each program of a launch adds to its own place in the buffers, so micro-batches add up without atomics and the result
is reproducible. Importing this needs Triton. The counts per element are `fp8watch.capture.statistics.kernels.tally`,
as in the kernel that counts many tensors in one launch; here tensors come one by one and are soon freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp8watch.capture.statistics.kernels import CODES_OF, SOURCES, tally
from fp8watch.capture.te.cast_launch import ALIGNMENT, LARGE
from fp8watch.capture.te.cast_rows import CastRow
from fp8watch.capture.triton_launch import Shortcut, is_hooked, shortcut
from fp8watch.formats import Fp8Format

BLOCK = 4096
NUM_WARPS = 8
PROGRAMS = 512
"""Programs per launch: enough to fill a GPU. 1,680 tensors x 512 places x 24 bytes are 20 MiB."""
DEVICE = "cuda"
"""Type of device that the kernel runs on; another one with Triton's interpreter."""


class _Launch(NamedTuple):
    """A compiled kernel: a call through `triton.jit` takes several times as long."""

    run: Callable[..., object]
    """With its grid."""
    constants: tuple[Any, ...]
    shortcut: Shortcut | None


_launches: dict[tuple[Any, ...], _Launch] = {}


# Specialising on the address of the scale (one element anywhere in a vector) or on the number of elements gains
# nothing; with fewer kinds of kernels the right one is found at once.
@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["scale_at"])  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    source, codes, scale_at, counts, sums, numel,
    INVERSE: tl.constexpr, CODES: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    scale = tl.load(scale_at)
    if INVERSE:
        scale = tl.math.div_rn(1.0, scale)  # `/` may be a unit in the last place off, and torch divides exactly
    saturated = tl.zeros([BLOCK], tl.int32)
    before = tl.zeros([BLOCK], tl.int32)
    after = tl.zeros([BLOCK], tl.int32)
    nonfinite = tl.zeros([BLOCK], tl.int32)
    error = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    start = program.to(tl.int64) * BLOCK
    while start < numel:
        offsets = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = offsets < numel
        x = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
        code = tl.load(codes + offsets, mask=inside, other=0).to(CODES, bitcast=True).to(tl.float32)
        s, b, a, n, e, q = tally(x, scale, x * scale, code, FP8_MAX)
        saturated += s
        before += b
        after += a
        nonfinite += n
        error += e
        square += q
        start += PROGRAMS * BLOCK
    place = counts + program * 4
    tl.store(place, tl.load(place) + tl.sum(saturated, 0))
    tl.store(place + 1, tl.load(place + 1) + tl.sum(before, 0))
    tl.store(place + 2, tl.load(place + 2) + tl.sum(after, 0))
    tl.store(place + 3, tl.load(place + 3) + tl.sum(nonfinite, 0))
    place = sums + program * 2
    tl.store(place, tl.load(place) + tl.sum(error, 0))
    tl.store(place + 1, tl.load(place + 1) + tl.sum(square, 0))


def add(
    row: CastRow, values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor,
    *, is_inverse: bool, fmt: Fp8Format, code: Any = None,
) -> bool:  # fmt: skip
    """Add a cast's statistics to a row's counts (int32 [PROGRAMS, 4]) and sums (float32 [PROGRAMS, 2]).

    `codes`: the bytes (uint8) that the cast made; `scale`: one float32 element, the inverse scale with `is_inverse`.
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
    kind = (device, values.dtype, fmt.name, is_inverse, numel < LARGE)
    known = None if (values_at | codes_at) % ALIGNMENT else _launches.get(kind)
    if known is None:
        if values.device.type != DEVICE or values.dtype not in SOURCES or fmt.name not in CODES_OF:
            return False
        known = _first_launch(row, values, codes, scale, is_inverse=is_inverse, fmt=fmt)
        if known is None or (values_at | codes_at | row.counts_at | row.sums_at) % ALIGNMENT:
            return True
        _launches[kind] = known
    else:
        known.run(values_at, codes_at, scale.data_ptr(), row.counts_at, row.sums_at, numel, *known.constants)
    if known.shortcut is not None and code is not None and is_inverse and numel < LARGE and not is_hooked():
        row.last = (known.shortcut, values.dtype, code)
    return True


def _first_launch(
    row: CastRow, values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, *, is_inverse: bool, fmt: Fp8Format
) -> _Launch | None:
    """Launch through `triton.jit`, which compiles; None: what it returns cannot be launched again."""
    constants = (is_inverse, CODES_OF[fmt.name], fmt.max, BLOCK, PROGRAMS)
    kernel: Any = _cast_kernel
    compiled = kernel[(PROGRAMS,)](
        values, codes, scale, row.counts, row.sums, values.numel(), *constants, num_warps=NUM_WARPS
    )  # fmt: skip
    if not hasattr(compiled, "packed_metadata"):
        return None
    short = shortcut(compiled, PROGRAMS, values.get_device())
    return _Launch(compiled[(PROGRAMS, 1, 1)], constants, short)
