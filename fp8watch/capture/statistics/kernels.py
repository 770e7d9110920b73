"""Counts on a GPU: one pass over each tensor, any number of tensors per launch.

Importing this needs Triton. A launch takes a table of addresses, so tensors are neither copied nor padded; the first
grid axis splits each tensor, the second is the tensor. Every program writes its own partial sums, which torch adds up:
no atomics, a reproducible result. The rounding is that of `fp8watch.emulation.cast`, in FP32, which gives exactly the
counts of `count_by_torch`; the two sums differ in the order of additions.

What limits the speed is first the number of loads in flight, then the number of instructions per element. So a thread
takes a unit of adjacent elements by one load, which needs addresses and rows that allow it, and keeps one counter per
unit rather than per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from fp8watch.capture.statistics import fused_items, tally
from fp8watch.capture.statistics.fused_items import ADJACENT
from fp8watch.formats import Fp8Format

if TYPE_CHECKING:
    from fp8watch.capture.statistics.count import Item, TensorStatistics

THREADS = 256
REGISTERS = 64
"""Most registers of a thread where units are long: four programs fit into a multiprocessor at once."""
ELEMENTS_A_PROGRAM = 32768
MOST_PROGRAMS = 528
"""Per tensor: four for each of the 132 multiprocessors of an H100 or H200. With a larger tensor each loops longer."""

SOURCES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CODES_OF = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


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
def rounded(  # type: ignore[no-untyped-def]
    scaled, CODES: tl.constexpr, FP8_MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, MAGIC: tl.constexpr,
    HAS_FP8: tl.constexpr,
):  # fmt: skip
    """The same by the GPU's own conversion, which saturates too, where it has one (`has_fp8_conversion`)."""
    return scaled.to(CODES).to(tl.float32) if HAS_FP8 else cast(scaled, FP8_MAX, MIN_NORMAL, MAGIC)


@triton.jit  # type: ignore[untyped-decorator]
def four_over(scale, HAS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four times the inverse of scales, to the accuracy of the sums; counts never depend on it.

    For scales per column, whose inverse is taken for every element. Those below 2^-124, which no finite amax gives, may
    have an infinite one.
    """
    quarter = scale * 0.25
    if HAS_FP8:
        # One instruction rather than the eight of a division. It takes subnormals for zero, and makes zeros of them: so
        # a quarter, because the inverse of the largest scales is subnormal.
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [quarter], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / quarter
    return inverse


@triton.jit(do_not_specialize=["first", "programs"])  # type: ignore[untyped-decorator]
def _count_kernel(  # type: ignore[no-untyped-def]
    table, counts, sums, first, programs,
    SOURCE: tl.constexpr, CODES: tl.constexpr, HAS_CODES: tl.constexpr, HAS_FP8: tl.constexpr,
    FP8_MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, MAGIC: tl.constexpr,
    MODE: tl.constexpr, ALIGNMENT: tl.constexpr, UNITS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Tensor `first` + n of the table by programs [programs, n], blocks of UNITS x EACH elements at a time.

    ALIGNMENT: what addresses are multiples of; a scale changes only between units, or with every element (MODE 2).
    """
    BLOCK: tl.constexpr = UNITS * EACH
    # By unit or at the end, where it costs less: without codes, nothing becomes zero by a scale that is not finite.
    CORRECTS: tl.constexpr = MODE != 2 and not HAS_CODES
    program = tl.program_id(0)
    tensor = first + tl.program_id(1)
    row = table + tensor * 5
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(SOURCE)), ALIGNMENT)
    codes = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.uint8)), ALIGNMENT)
    scales = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    numel = tl.load(row + 3)
    unit = tl.arange(0, UNITS)[:, None] * EACH
    each = tl.arange(0, EACH)[None, :]
    start = program.to(tl.int64) * BLOCK
    step = programs.to(tl.int64) * BLOCK
    if MODE == 0:
        scale = tl.load(scales)
        inverse = 1.0 / scale
    else:
        # Where each unit lies. A step adds to it, because a division for every block would cost more than the counting.
        length = tl.load(row + 4)
        line = ((start + unit) // length).to(tl.int32)
        column = tl.multiple_of(((start + unit) % length).to(tl.int32), [EACH, EACH])
        step_lines = (step // length).to(tl.int32)
        step_columns = (step % length).to(tl.int32)
        length = length.to(tl.int32)
        if MODE == 2:
            scales = tl.multiple_of(scales, ALIGNMENT)

    saturated, before, after, nonfinite, error, square = tally.nothing(UNITS)
    amax = tl.zeros([UNITS], tl.float32)
    while start < numel:
        # By unit, all of which end with the tensor or before: a mask by element would take a load for every element.
        inside = unit < tl.minimum(numel - start, BLOCK).to(tl.int32)
        x = tl.load(source + start + (unit + each), mask=inside, other=0.0).to(tl.float32)
        if HAS_CODES:
            byte = tl.load(codes + start + (unit + each), mask=inside, other=0)
        if MODE == 1:
            scale = tl.load(scales + line, mask=inside, other=1.0)
        elif MODE == 2:
            scale = tl.load(scales + (column + each), mask=inside, other=1.0)
        if MODE != 0:
            inverse = four_over(scale, HAS_FP8)
        scaled = x * scale
        if HAS_CODES:
            code = byte.to(CODES, bitcast=True).to(tl.float32)
        else:
            code = rounded(scaled, CODES, FP8_MAX, MIN_NORMAL, MAGIC, HAS_FP8)
        s, b, a, n, e, q = tally.tally(x, scaled, code, inverse, FP8_MAX, CORRECTS)
        saturated += tl.sum(s, 1)
        before += tl.sum(b, 1)
        nonfinite += tl.sum(n, 1)
        if CORRECTS and MODE == 1:
            after += tally.kept(tl.reshape(scale, [UNITS]), tl.sum(a, 1), tl.sum(b, 1))
        else:
            after += tl.sum(a, 1)
        if MODE != 0:
            error += tl.sum(e, 1) * 0.0625
        else:
            error += tl.sum(e, 1)
        square += tl.sum(q, 1)
        amax = tl.maximum(amax, tally.largest(x, 1))
        start += step
        if MODE != 0:
            line += step_lines
            column += step_columns
            is_over = column >= length
            line += is_over.to(tl.int32)
            column = tl.multiple_of(tl.where(is_over, column - length, column), [EACH, EACH])
    if CORRECTS and MODE == 0:
        after = tally.kept(scale, after, before)
    place = tensor * programs + program
    tl.store(counts + place * 4, tally.total(saturated, 0).to(tl.int64))
    tl.store(counts + place * 4 + 1, tally.total(before, 0).to(tl.int64))
    tl.store(counts + place * 4 + 2, tally.total(after, 0).to(tl.int64))
    tl.store(counts + place * 4 + 3, tally.total(nonfinite, 0).to(tl.int64))
    tl.store(sums + place * 3, tl.sum(error, 0))
    tl.store(sums + place * 3 + 1, tl.sum(square, 0))
    tl.store(sums + place * 3 + 2, tl.max(amax, 0))


def count_fused(items: Sequence[Item]) -> dict[int, TensorStatistics]:
    """Statistics by position, without the items that the kernel cannot take (layout, dtype, format, device)."""
    devices: dict[torch.device, list[int]] = {}
    items = [fused_items.by_rows(item) for item in items]
    for i, item in enumerate(items):
        if fits(item):
            devices.setdefault(item.values.device, []).append(i)
    found: dict[int, TensorStatistics] = {}
    for positions in devices.values():
        found.update(zip(positions, launch([items[i] for i in positions]), strict=True))
    return found


def fits(item: Item) -> bool:
    """Whether the kernel can read the tensors in place."""
    return item.values.dtype in SOURCES and item.fmt.name in CODES_OF and fused_items.is_plain(item)


class _Kind(NamedTuple):
    """What the kernel is compiled for."""

    dtype: torch.dtype
    fmt: Fp8Format
    has_codes: bool
    mode: int | None
    is_regular: bool


def _kind(item: Item) -> _Kind:
    mode = fused_items.scale_mode(item.values, item.scale)
    regular = fused_items.is_regular(item, by_row=False)
    return _Kind(item.values.dtype, item.fmt, item.codes is not None, mode, regular)


def launch(items: Sequence[Item]) -> list[TensorStatistics]:
    """Count tensors of one device, in one launch for each kind."""
    from fp8watch.capture.statistics.count import TensorStatistics

    device = items[0].values.device
    kinds: dict[_Kind, list[int]] = {}
    for i, item in enumerate(items):
        kinds.setdefault(_kind(item), []).append(i)
    order = [i for positions in kinds.values() for i in positions]
    table = fused_items.on_device([_addresses(items[i]) for i in order], device)
    largest = max(item.values.numel() for item in items)
    programs = min(MOST_PROGRAMS, triton.cdiv(largest, ELEMENTS_A_PROGRAM))
    counts = torch.empty(len(items), programs, 4, dtype=torch.int64, device=device)
    sums = torch.empty(len(items), programs, 3, dtype=torch.float32, device=device)
    first = 0
    for kind, positions in kinds.items():
        _launch_kind(kind, (programs, len(positions)), table, counts, sums, first)
        first += len(positions)
    sizes, (saturated, before, after, nonfinite) = table[:, 3], counts.sum(1).unbind(1)
    underflowed, zeros = before - after, sizes - before
    amax, totals = sums[..., 2].amax(1), sums[..., :2].sum(1)
    found = {
        i: TensorStatistics(
            quantized=sizes[at],
            saturated=saturated[at],
            underflowed=underflowed[at],
            zeros=zeros[at],
            nonfinite=nonfinite[at],
            squared_error=totals[at, 0],
            squared_values=totals[at, 1],
            amax=amax[at],
        )
        for at, i in enumerate(order)
    }
    return [found[i] for i in range(len(items))]


def _addresses(item: Item) -> tuple[int, ...]:
    """A row of the table: addresses of values, codes and scales, number of elements, row length."""
    codes_at = 0 if item.codes is None else item.codes.data_ptr()
    values = item.values
    return (values.data_ptr(), codes_at, item.scale.data_ptr(), values.numel(), fused_items.row_length(values))


def _launch_kind(
    kind: _Kind, grid: tuple[int, int], table: torch.Tensor, counts: torch.Tensor, sums: torch.Tensor, first: int
) -> None:
    """Count the tensors from row `first` of the table on, all of one kind."""
    fmt, kernel = kind.fmt, _count_kernel
    if not kind.is_regular:
        units, each = 4 * THREADS, 1
    elif kind.has_codes:
        units, each = THREADS, ADJACENT
    else:
        units, each = 2 * THREADS, ADJACENT // kind.dtype.itemsize  # two loads in flight per thread
    has_fp8 = has_fp8_conversion(table.device)
    kernel[grid](
        table, counts, sums, first, grid[0],
        SOURCE=SOURCES[kind.dtype], CODES=CODES_OF[fmt.name], HAS_CODES=kind.has_codes, HAS_FP8=has_fp8,
        FP8_MAX=fmt.max, MIN_NORMAL=fmt.min_normal, MAGIC=magic(fmt),
        MODE=kind.mode, ALIGNMENT=ADJACENT if kind.is_regular else 1, UNITS=units, EACH=each,
        num_warps=THREADS // 32, **limits(kind.is_regular),
    )  # fmt: skip


def magic(fmt: Fp8Format) -> float:
    """See `fp8watch.emulation.cast.round_to_fp8`."""
    factor: float = 1.5 * 2.0 ** (23 - fmt.mantissa_bits)
    return factor


def has_fp8_conversion(device: torch.device) -> bool:
    """Whether Triton's conversion from FP32 to FP8 is one instruction there (NVIDIA, compute capability 9.0 and later).

    Elsewhere, on GPUs of 8.9 too, it goes by FP16, which rounds twice and counts other zeros.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def limits(is_regular: bool) -> dict[str, int]:
    """Options of a launch that Triton has for NVIDIA only."""
    return {"maxnreg": REGISTERS} if is_regular and torch.version.hip is None else {}
