"""Counting one cast where it happens, on a GPU: one launch, no table, no copy, nothing made on the host.

Each program of a launch owns a place in the buffers and adds to it, so that micro-batches add up without atomics and
the result is the same every time. Importing this needs Triton. What is counted of an element is
`fp8watch.capture.statistics.kernels.tally`, as where many tensors are at hand at once and share a launch; here they
come one by one and are gone a moment later.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fp8watch.capture.statistics.kernels import CODES_OF, SOURCES, tally
from fp8watch.formats import Fp8Format

BLOCK = 4096
NUM_WARPS = 8
PROGRAMS = 512
"""A launch: enough to fill a GPU. 1,680 tensors x 512 places x 24 bytes are 20 MiB."""
COUNTS, SUMS = 4, 2
"""Saturated, non-zero before, non-zero after, non-finite; squared error, squared values."""


@triton.jit  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    source, codes, scale_at, counts, sums, numel,
    INVERSE: tl.constexpr, CODES: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    scale = tl.load(scale_at)
    if INVERSE:
        scale = 1.0 / scale
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


def fits(values: torch.Tensor, codes: torch.Tensor, fmt: Fp8Format) -> bool:
    """Whether the kernel can read both where they lie."""
    return (
        values.device.type == "cuda"
        and values.dtype in SOURCES
        and values.is_contiguous()
        and codes.is_contiguous()
        and codes.numel() == values.numel()
        and fmt.name in CODES_OF
    )


def add(
    values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, *, is_inverse: bool, fmt: Fp8Format,
    counts: torch.Tensor, sums: torch.Tensor,
) -> None:  # fmt: skip
    """Add what a cast did to `counts` (int32 [PROGRAMS, 4]) and `sums` (float32 [PROGRAMS, 2]).

    `codes`: the bytes (uint8) it made; `scale`: one float32 element, or with `is_inverse` what it is divided by.
    """
    kernel: Any = _cast_kernel
    kernel[(PROGRAMS,)](
        values, codes, scale, counts, sums, values.numel(),
        INVERSE=is_inverse, CODES=CODES_OF[fmt.name], FP8_MAX=fmt.max, BLOCK=BLOCK, PROGRAMS=PROGRAMS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
