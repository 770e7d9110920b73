"""All what-if candidates of many tensors in one launch, each tensor read once.

Importing this needs Triton. The table of addresses, the second grid axis, the partial sums and the counters by thread
are as in `kernels`. A program loops over groups of 1x128 tiles, which never cross a row, so the amax of a tile and of
its four 1x32 parts is found in registers. Tile scales are made from the bits of amax (no division) and the current
scale by torch, so counts are exactly those of `what_if_by_torch`; sums differ in the order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from fp8watch.capture.statistics import fused_items, kernels, tally
from fp8watch.formats import E4M3, Fp8Format
from fp8watch.what_if import CANDIDATES

if TYPE_CHECKING:
    from fp8watch.capture.statistics.count import Item
    from fp8watch.capture.statistics.what_if import WhatIfStatistics

NUM_WARPS = 8
TILES = {8: 16, 4: 8, 1: 4}
"""1x128 tiles that a program holds at once, by the number of adjacent elements that a thread takes: one unit a thread,
or with single elements two."""
TILES_A_PROGRAM = 256
_COUNTS, _SUMS = 1 + 2 * len(CANDIDATES), 1 + len(CANDIDATES)


@triton.jit  # type: ignore[untyped-decorator]
def _lost(  # type: ignore[no-untyped-def]
    x, scale, inverse,
    CODES: tl.constexpr, FP8_MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, MAGIC: tl.constexpr, HAS_FP8: tl.constexpr,
    ZEROS_STAY: tl.constexpr = True,
):  # fmt: skip
    """Saturated, not zero before and after, squared error of one cast of x [.., .., each], added up over the last axis.

    All float32, and ZEROS_STAY, as in `tally.tally`.
    """
    scaled = x * scale
    code = kernels.rounded(scaled, CODES, FP8_MAX, MIN_NORMAL, MAGIC, HAS_FP8)
    # Before the counts, because the compiler keeps this order; that `tally` has it again costs nothing.
    error = tally.deviation(scaled, code, inverse)
    saturated, _, after, _, _, _ = tally.tally(x, scaled, code, inverse, FP8_MAX, ZEROS_STAY)
    return tl.sum(saturated, 2), tl.sum(after, 2), tl.sum(error * error, 2)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_scale(amax, TILES: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale and inverse [TILES, 128 / EACH, 1] of tiles by their amax [TILES, 1 or 4]; see `what_if.tile_scale`."""
    bits = amax.to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = 262 - (bits >> 23) - above
    power = tl.where(power < 1, 1, tl.where(power > 254, 254, power))
    is_use = (bits > 0) & ((bits >> 23) < 255)
    power = tl.where(is_use, power, 127)
    power = tl.reshape(tl.broadcast_to(power[:, :, None], [TILES, 4, 32 // EACH]), [TILES, 128 // EACH])[:, :, None]
    return (power << 23).to(tl.float32, bitcast=True), ((254 - power) << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _zeros(TILES: tl.constexpr, UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One kind of counter [TILES, UNITS] for each candidate, before the first element."""
    none = tl.zeros([TILES, UNITS], tl.float32)
    return none, none, none, none, none


@triton.jit(do_not_specialize=["first", "programs"])  # type: ignore[untyped-decorator]
def _what_if_kernel(  # type: ignore[no-untyped-def]
    table, current, counts, sums, first, programs,
    SOURCE: tl.constexpr, HAS_FP8: tl.constexpr,
    CODES: tl.constexpr, FP8_MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, MAGIC: tl.constexpr,
    E4M3: tl.constexpr, E4M3_MAX: tl.constexpr, E4M3_MIN_NORMAL: tl.constexpr, E4M3_MAGIC: tl.constexpr,
    MODE: tl.constexpr, ALIGNMENT: tl.constexpr, TILES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Tensor `first` + n of the table by programs [programs, n], TILES tiles at a time.

    ALIGNMENT: what addresses and row lengths are multiples of; EACH: adjacent elements that a thread takes.
    """
    UNITS: tl.constexpr = 128 // EACH
    program = tl.program_id(0)
    tensor = first + tl.program_id(1)
    row = table + tensor * 4
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(SOURCE)), ALIGNMENT)
    scales = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    tiles = tl.load(row + 2)
    length = tl.multiple_of(tl.load(row + 3), ALIGNMENT)
    if MODE == 0:
        scale = tl.load(scales)
        half_inverse, quarter_inverse = 1.0 / (scale * 0.5), 1.0 / (scale * 0.25)
    elif MODE == 2:
        scales = tl.multiple_of(scales, ALIGNMENT)
    own = tl.load(current + tensor)
    own_inverse = 1.0 / own
    # Where the group's first tile lies; a step adds to it, because 64-bit divisions cost more than the counting.
    start = program.to(tl.int64) * TILES
    step = programs.to(tl.int64) * TILES
    a_row = (length + 127) // 128
    lines = (tiles // a_row).to(tl.int32)
    first_line = (start // a_row).to(tl.int32)
    first_tile = (start % a_row).to(tl.int32)
    step_lines = (step // a_row).to(tl.int32)
    step_tiles = (step % a_row).to(tl.int32)
    a_row = a_row.to(tl.int32)

    before = tl.zeros([TILES, UNITS], tl.float32)
    saturated_1, saturated_2, saturated_3, saturated_4, saturated_5 = _zeros(TILES, UNITS)
    after_1, after_2, after_3, after_4, after_5 = _zeros(TILES, UNITS)
    square = tl.zeros([TILES, UNITS], tl.float32)
    error_1, error_2, error_3, error_4, error_5 = _zeros(TILES, UNITS)
    while start < tiles:
        tile = first_tile + tl.arange(0, TILES)[:, None]
        below = (tile.to(tl.uint32) // a_row.to(tl.uint32)).to(tl.int32)
        line = first_line + below
        place = (tile - below * a_row) * 128 + tl.arange(0, 128)[None, :]
        inside = (line < lines) & (place < length)
        x = tl.load(source + (line.to(tl.int64) * length + place), mask=inside, other=0.0).to(tl.float32)
        x = tl.reshape(x, [TILES, UNITS, EACH])
        if MODE == 1:
            of_unit = line + tl.zeros([1, UNITS], tl.int32)
            scale = tl.load(scales + of_unit, mask=of_unit < lines, other=1.0)[:, :, None]
        elif MODE == 2:
            scale = tl.reshape(tl.load(scales + place, mask=inside, other=1.0), [TILES, UNITS, EACH])
        if MODE != 0:
            quarter_inverse = kernels.four_over(scale, HAS_FP8)
            half_inverse = quarter_inverse * 0.5
        b = tl.sum(tally.not_zero(x), 2)
        before += b
        square += tl.sum(x * x, 2)
        s, a, e = _lost(
            x, scale * 0.5, half_inverse, CODES, FP8_MAX, MIN_NORMAL, MAGIC, HAS_FP8, MODE != 2
        )  # fmt: skip
        saturated_1 += s
        after_1 += tally.kept(tl.reshape(scale, [TILES, UNITS]), a, b) if MODE == 1 else a
        error_1 += e
        s, a, e = _lost(
            x, scale * 0.25, quarter_inverse, CODES, FP8_MAX, MIN_NORMAL, MAGIC, HAS_FP8, MODE != 2
        )  # fmt: skip
        saturated_2 += s
        after_2 += tally.kept(tl.reshape(scale, [TILES, UNITS]), a, b) if MODE == 1 else a
        error_2 += e
        s, a, e = _lost(x, own, own_inverse, CODES, FP8_MAX, MIN_NORMAL, MAGIC, HAS_FP8)
        saturated_3 += s
        after_3 += a
        error_3 += e
        largest = tally.largest(x, 2)
        short = tl.max(tl.reshape(largest, [TILES, 4, UNITS // 4]), 2)
        long = tl.max(short, 1)[:, None]
        tile_scale, tile_inverse = _tile_scale(long, TILES, EACH)
        s, a, e = _lost(x, tile_scale, tile_inverse, E4M3, E4M3_MAX, E4M3_MIN_NORMAL, E4M3_MAGIC, HAS_FP8)
        saturated_4 += s
        after_4 += a
        error_4 += e
        tile_scale, tile_inverse = _tile_scale(short, TILES, EACH)
        s, a, e = _lost(x, tile_scale, tile_inverse, E4M3, E4M3_MAX, E4M3_MIN_NORMAL, E4M3_MAGIC, HAS_FP8)
        saturated_5 += s
        after_5 += a
        error_5 += e
        start += step
        first_line += step_lines
        first_tile += step_tiles
        if first_tile >= a_row:
            first_line += 1
            first_tile -= a_row

    if MODE == 0:  # at the end, where it costs less
        after_1 = tally.kept(scale, after_1, before)
        after_2 = tally.kept(scale, after_2, before)
    to = counts + (tensor * programs + program) * 11
    tl.store(to, tally.total(before, None).to(tl.int64))
    tl.store(to + 1, tally.total(saturated_1, None).to(tl.int64))
    tl.store(to + 2, tally.total(saturated_2, None).to(tl.int64))
    tl.store(to + 3, tally.total(saturated_3, None).to(tl.int64))
    tl.store(to + 4, tally.total(saturated_4, None).to(tl.int64))
    tl.store(to + 5, tally.total(saturated_5, None).to(tl.int64))
    tl.store(to + 6, tally.total(after_1, None).to(tl.int64))
    tl.store(to + 7, tally.total(after_2, None).to(tl.int64))
    tl.store(to + 8, tally.total(after_3, None).to(tl.int64))
    tl.store(to + 9, tally.total(after_4, None).to(tl.int64))
    tl.store(to + 10, tally.total(after_5, None).to(tl.int64))
    to = sums + (tensor * programs + program) * 6
    tl.store(to, tl.sum(square))
    tl.store(to + 1, tl.sum(error_1))
    tl.store(to + 2, tl.sum(error_2))
    tl.store(to + 3, tl.sum(error_3))
    tl.store(to + 4, tl.sum(error_4))
    tl.store(to + 5, tl.sum(error_5))


def what_if_fused(items: Sequence[Item], amaxes: Sequence[torch.Tensor]) -> dict[int, WhatIfStatistics]:
    """Figures by position, without the items that the kernel cannot take."""
    devices: dict[torch.device, list[int]] = {}
    items = [fused_items.by_rows(item) for item in items]
    for i, item in enumerate(items):
        if fits(item):
            devices.setdefault(item.values.device, []).append(i)
    found: dict[int, WhatIfStatistics] = {}
    for positions in devices.values():
        results = launch([items[i] for i in positions], [amaxes[i] for i in positions])
        found.update(zip(positions, results, strict=True))
    return found


def fits(item: Item) -> bool:
    """Whether the kernel can read the tensors in place."""
    return kernels.fits(item) and not fused_items.is_large(item.values)


class _Kind(NamedTuple):
    """What the kernel is compiled for."""

    dtype: torch.dtype
    fmt: Fp8Format
    mode: int | None
    is_regular: bool


def _kind(item: Item) -> _Kind:
    mode = fused_items.scale_mode(item.values, item.scale)
    return _Kind(item.values.dtype, item.fmt, mode, fused_items.is_regular(item, by_row=True))


def launch(items: Sequence[Item], amaxes: Sequence[torch.Tensor]) -> list[WhatIfStatistics]:
    """Count tensors of one device, in one launch for each kind."""
    from fp8watch.capture.statistics.what_if import WhatIfStatistics, current_scale

    device = items[0].values.device
    kinds: dict[_Kind, list[int]] = {}
    for i, item in enumerate(items):
        kinds.setdefault(_kind(item), []).append(i)
    order = [i for positions in kinds.values() for i in positions]
    rows = [_addresses(items[i]) for i in order]
    table = fused_items.on_device(rows, device)
    amax = torch.stack([amaxes[i].detach().float().reshape(()) for i in order])
    programs = min(kernels.MOST_PROGRAMS, triton.cdiv(max(row[2] for row in rows), TILES_A_PROGRAM))
    counts = torch.empty(len(items), programs, _COUNTS, dtype=torch.int64, device=device)
    sums = torch.empty(len(items), programs, _SUMS, dtype=torch.float32, device=device)
    first = 0
    for kind, positions in kinds.items():
        grid = (programs, len(positions))
        _launch_kind(kind, grid, table, current_scale(amax, kind.fmt), counts, sums, first)
        first += len(positions)
    total, squares = counts.sum(1), sums.sum(1)
    num = len(CANDIDATES)
    underflowed, saturated = total[:, :1] - total[:, num + 1 :], total[:, 1 : num + 1]
    found = {
        i: WhatIfStatistics(
            underflowed=underflowed[at],
            saturated=saturated[at],
            squared_error=squares[at, 1:],
            squared_values=squares[at, 0],
        )
        for at, i in enumerate(order)
    }
    return [found[i] for i in range(len(items))]


def _addresses(item: Item) -> tuple[int, ...]:
    """A row of the table: addresses of values and scales, number of tiles, row length."""
    values, length = item.values, fused_items.row_length(item.values)
    tiles = values.numel() // length * triton.cdiv(length, 128)
    return (values.data_ptr(), item.scale.data_ptr(), tiles, length)


def _launch_kind(
    kind: _Kind, grid: tuple[int, int], table: torch.Tensor, current: torch.Tensor, counts: torch.Tensor,
    sums: torch.Tensor, first: int,
) -> None:  # fmt: skip
    """Count the tensors from row `first` of the table on, all of one kind."""
    fmt, kernel = kind.fmt, _what_if_kernel
    each = fused_items.ADJACENT // kind.dtype.itemsize if kind.is_regular else 1
    kernel[grid](
        table, current, counts, sums, first, grid[0],
        SOURCE=kernels.SOURCES[kind.dtype], HAS_FP8=kernels.has_fp8_conversion(table.device),
        CODES=kernels.CODES_OF[fmt.name], FP8_MAX=fmt.max, MIN_NORMAL=fmt.min_normal, MAGIC=kernels.magic(fmt),
        E4M3=kernels.CODES_OF[E4M3.name], E4M3_MAX=E4M3.max, E4M3_MIN_NORMAL=E4M3.min_normal,
        E4M3_MAGIC=kernels.magic(E4M3),
        MODE=kind.mode, ALIGNMENT=fused_items.ADJACENT if kind.is_regular else 1,
        TILES=TILES[each], EACH=each, num_warps=NUM_WARPS, **kernels.limits(kind.is_regular),
    )  # fmt: skip
