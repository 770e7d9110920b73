"""Counts on a GPU: one pass over each tensor, any number of tensors per launch.

Importing this needs Triton. A launch takes a table of addresses, so tensors are neither copied nor padded; the first
grid axis splits each tensor, the second is the tensor. Every program writes its own partial sums, which torch adds up:
no atomics, a reproducible result. The rounding is that of `fp8watch.emulation.cast`, in FP32, which gives exactly the
counts of `count_by_torch`; the two sums differ in the order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from fp8watch.formats import Fp8Format

if TYPE_CHECKING:
    from fp8watch.capture.statistics.count import Item, TensorStatistics

BLOCK = 1024
ELEMENTS_A_PROGRAM = 16 * BLOCK
MOST_PROGRAMS = 1024
"""Per tensor; with a larger tensor each program loops longer."""
COLUMNS = 6
"""Columns of the table: addresses of values, scales and codes, number of elements, row length, scale mode."""

SOURCES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CODES_OF = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}
_ONE, _A_ROW, _A_COLUMN = 0, 1, 2


@triton.jit  # type: ignore[untyped-decorator]
def cast(scaled, FP8_MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, MAGIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scaled values rounded to the format: saturating, ties to even."""
    # Comparisons rather than a clamp, because they keep NaN.
    clamped = tl.where(scaled > FP8_MAX, FP8_MAX, scaled)
    clamped = tl.where(clamped < -FP8_MAX, -FP8_MAX, clamped)
    power = (clamped.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.where(power < MIN_NORMAL, MIN_NORMAL, power) * MAGIC
    return (clamped + magic) - magic


@triton.jit  # type: ignore[untyped-decorator]
def tally(x, scale, scaled, code, FP8_MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Per element: saturated, not zero before, not zero after, not finite (int32), squared error, square (float32).

    `scaled`: `x * scale`; `code`: the value of its code.
    """
    saturated = (tl.abs(scaled) > FP8_MAX).to(tl.int32)
    before = (x != 0.0).to(tl.int32)
    after = (code != 0.0).to(tl.int32)
    nonfinite = ((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32)
    difference = (scaled - code) / scale
    return saturated, before, after, nonfinite, difference * difference, x * x


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(  # type: ignore[no-untyped-def]
    table, counts, sums, programs,
    SOURCE: tl.constexpr, CODES: tl.constexpr, HAS_CODES: tl.constexpr,
    FP8_MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, MAGIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.program_id(1)
    row = table + tensor * 6
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    scales = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    codes = tl.load(row + 2).to(tl.pointer_type(tl.uint8))
    numel = tl.load(row + 3)
    length = tl.load(row + 4)
    mode = tl.load(row + 5)

    saturated = tl.zeros([BLOCK], tl.int32)
    before = tl.zeros([BLOCK], tl.int32)
    after = tl.zeros([BLOCK], tl.int32)
    nonfinite = tl.zeros([BLOCK], tl.int32)
    error = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    amax = tl.zeros([BLOCK], tl.float32)
    start = program.to(tl.int64) * BLOCK
    while start < numel:
        offsets = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = offsets < numel
        x = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
        index = tl.where(mode == 1, offsets // length, tl.where(mode == 2, offsets % length, 0))
        scale = tl.load(scales + index, mask=inside, other=1.0)
        scaled = x * scale
        if HAS_CODES:
            byte = tl.load(codes + offsets, mask=inside, other=0)
            code = byte.to(CODES, bitcast=True).to(tl.float32)
        else:
            code = cast(scaled, FP8_MAX, MIN_NORMAL, MAGIC)
        s, b, a, n, e, q = tally(x, scale, scaled, code, FP8_MAX)
        saturated += s
        before += b
        after += a
        nonfinite += n
        error += e
        square += q
        amax = tl.maximum(amax, tl.where(x != x, 0.0, tl.abs(x)))
        start += programs * BLOCK
    place = tensor * programs + program
    tl.store(counts + place * 4, tl.sum(saturated, 0).to(tl.int64))
    tl.store(counts + place * 4 + 1, tl.sum(before, 0).to(tl.int64))
    tl.store(counts + place * 4 + 2, tl.sum(after, 0).to(tl.int64))
    tl.store(counts + place * 4 + 3, tl.sum(nonfinite, 0).to(tl.int64))
    tl.store(sums + place * 3, tl.sum(error, 0))
    tl.store(sums + place * 3 + 1, tl.sum(square, 0))
    tl.store(sums + place * 3 + 2, tl.max(amax, 0))


def count_fused(items: Sequence[Item]) -> dict[int, TensorStatistics]:
    """Statistics by position, without the items that the kernel cannot take (layout, dtype, format, device)."""
    groups: dict[tuple[torch.device, torch.dtype, str, bool], list[int]] = {}
    items = [by_rows(item) for item in items]
    for i, item in enumerate(items):
        if fits(item):
            key = (item.values.device, item.values.dtype, item.fmt.name, item.codes is not None)
            groups.setdefault(key, []).append(i)
    found: dict[int, TensorStatistics] = {}
    for positions in groups.values():
        found.update(zip(positions, launch([items[i] for i in positions]), strict=True))
    return found


def by_rows(item: Item) -> Item:
    """A transposed matrix (torchao's weights) as it lies in memory, because counts do not depend on the order."""
    values = item.values
    if values.dim() != 2 or values.is_contiguous() or not values.t().is_contiguous():
        return item
    scale = item.scale.t() if item.scale.dim() == 2 else item.scale
    codes = None if item.codes is None else item.codes.t()
    return replace(item, values=values.t(), scale=scale, codes=codes)


def fits(item: Item) -> bool:
    """Whether the kernel can read the tensors in place."""
    values, scale, codes = item.values, item.scale, item.codes
    return (
        values.device.type == "cuda"
        and type(values) in (torch.Tensor, torch.nn.Parameter)
        and values.is_contiguous()
        and values.numel() > 0
        and values.dtype in SOURCES
        and item.fmt.name in CODES_OF
        and type(scale) is torch.Tensor
        and scale.device == values.device
        and scale.dtype == torch.float32
        and scale.is_contiguous()
        and scale_mode(values, scale) is not None
        and (codes is None or (codes.is_contiguous() and codes.shape == values.shape and codes.element_size() == 1))
    )


def scale_mode(values: torch.Tensor, scale: torch.Tensor) -> int | None:
    """How `scale` broadcasts over `values`: one, one per row (last dimension), one per column; None: another way."""
    if scale.numel() == 1:
        return _ONE
    if values.dim() and scale.shape == (*values.shape[:-1], 1):
        return _A_ROW
    if values.dim() and scale.numel() == values.shape[-1] and scale.shape[-1] == values.shape[-1]:
        return _A_COLUMN
    return None


def launch(items: Sequence[Item]) -> list[TensorStatistics]:
    """Count tensors of one device, dtype and format, all with codes or all without, in one launch."""
    from fp8watch.capture.statistics.count import TensorStatistics

    fmt: Fp8Format = items[0].fmt
    device, dtype = items[0].values.device, items[0].values.dtype
    rows = [
        (
            item.values.data_ptr(), item.scale.data_ptr(), 0 if item.codes is None else item.codes.data_ptr(),
            item.values.numel(), item.values.shape[-1] if item.values.dim() else 1,
            scale_mode(item.values, item.scale),
        )
        for item in items
    ]  # fmt: skip
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    largest = max(item.values.numel() for item in items)
    programs = min(MOST_PROGRAMS, triton.cdiv(largest, ELEMENTS_A_PROGRAM))
    counts = torch.empty(len(items), programs, 4, dtype=torch.int64, device=device)
    sums = torch.empty(len(items), programs, 3, dtype=torch.float32, device=device)
    kernel: Any = _count_kernel
    kernel[(programs, len(items))](
        table, counts, sums, programs,
        SOURCE=SOURCES[dtype], CODES=CODES_OF[fmt.name], HAS_CODES=items[0].codes is not None,
        FP8_MAX=fmt.max, MIN_NORMAL=fmt.min_normal, MAGIC=1.5 * 2.0 ** (23 - fmt.mantissa_bits), BLOCK=BLOCK,
    )  # fmt: skip
    counts = counts.sum(1)
    amax, totals = sums[..., 2].amax(1), sums[..., :2].sum(1)
    sizes = torch.tensor([item.values.numel() for item in items], dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        sizes = sizes.pin_memory().to(device, non_blocking=True)
    return [
        TensorStatistics(
            quantized=sizes[i],
            saturated=counts[i, 0],
            underflowed=counts[i, 1] - counts[i, 2],
            zeros=sizes[i] - counts[i, 1],
            nonfinite=counts[i, 3],
            squared_error=totals[i, 0],
            squared_values=totals[i, 1],
            amax=amax[i],
        )
        for i in range(len(items))
    ]
