"""The kernel that writes a step's numbers to pinned host memory and then says that they are there.

One program copies all pieces one after the other, a few kilobytes to a few tens of kilobytes, and releases a sequence
number at system scope: whoever sees it on the host sees the bytes too (PTX memory consistency model: the barrier orders
the program's writes before the release). Importing this needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024
"""Units of two bytes that are copied at a time; the smallest element of a piece is a BF16 scalar."""
NUM_WARPS = 8
MOST_PIECES = 12
"""Pieces of one launch: two vectors of amaxes and two of scales, twice over, and four scalars."""


@triton.jit  # type: ignore[untyped-decorator]
def _copy(out, start, source, units, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pieces = source.to(tl.pointer_type(tl.int16))
    done = 0
    while done < units:
        offsets = done + tl.arange(0, BLOCK)
        inside = offsets < units
        tl.store(out + start + offsets, tl.load(pieces + offsets, mask=inside, other=0), mask=inside)
        done += BLOCK
    return start + units


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "out_at", "flag_at", "sequence", *(f"a{i}" for i in range(MOST_PIECES)), *(f"n{i}" for i in range(MOST_PIECES)),
    ]
)  # fmt: skip
def gather(  # type: ignore[no-untyped-def]
    out_at, flag_at, sequence, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, BLOCK: tl.constexpr,
):  # fmt: skip
    """Addresses (64 bits) and lengths (units of two bytes) of the pieces; those that are left over have length 0."""
    out = out_at.to(tl.pointer_type(tl.int16))
    start = _copy(out, 0, a0, n0, BLOCK)
    start = _copy(out, start, a1, n1, BLOCK)
    start = _copy(out, start, a2, n2, BLOCK)
    start = _copy(out, start, a3, n3, BLOCK)
    start = _copy(out, start, a4, n4, BLOCK)
    start = _copy(out, start, a5, n5, BLOCK)
    start = _copy(out, start, a6, n6, BLOCK)
    start = _copy(out, start, a7, n7, BLOCK)
    start = _copy(out, start, a8, n8, BLOCK)
    start = _copy(out, start, a9, n9, BLOCK)
    start = _copy(out, start, a10, n10, BLOCK)
    start = _copy(out, start, a11, n11, BLOCK)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r", [flag_at, sequence],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
