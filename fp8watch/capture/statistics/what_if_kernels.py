"""All what-if candidates of many tensors in one launch, each tensor read once.

Importing this needs Triton. The table of addresses, the second grid axis and the partial sums are as in `kernels`. A
program loops over groups of 1x128 tiles, which never cross a row, so the amax of a tile and of its four 1x32 parts is
found in registers. Tile scales are made from the bits of amax (no division) and the current scale by torch, so counts
are exactly those of `what_if_by_torch`; sums differ in the order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from fp8watch.capture.statistics import kernels
from fp8watch.formats import E4M3, Fp8Format
from fp8watch.what_if import CANDIDATES

if TYPE_CHECKING:
    from fp8watch.capture.statistics.count import Item
    from fp8watch.capture.statistics.what_if import WhatIfStatistics

TILES = 4
"""1x128 tiles that a program holds at once: 512 elements, four per thread, with seventeen counters."""
TILES_A_PROGRAM = 16 * TILES
MOST_PROGRAMS = 1024
_COUNTS, _SUMS = 1 + 2 * len(CANDIDATES), 1 + len(CANDIDATES)


@triton.jit  # type: ignore[untyped-decorator]
def _lost(x, scale, inverse, FP8_MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, MAGIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Saturated, not zero after (int32) and squared error (float32) of one cast, per element."""
    scaled = x * scale
    code = kernels.cast(scaled, FP8_MAX, MIN_NORMAL, MAGIC)
    difference = (scaled - code) * inverse
    return (tl.abs(scaled) > FP8_MAX).to(tl.int32), (code != 0.0).to(tl.int32), difference * difference


@triton.jit
def _tile_power(amax):  # type: ignore[no-untyped-def]
    """Biased exponent of fp8_max / amax, rounded down to a power of two; see `what_if.tile_scale`."""
    bits = amax.to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = 262 - (bits >> 23) - above
    power = tl.where(power < 1, 1, tl.where(power > 254, 254, power))
    is_use = (bits > 0) & ((bits >> 23) < 255)
    return tl.where(is_use, power, 127)


@triton.jit  # type: ignore[untyped-decorator]
def _what_if_kernel(  # type: ignore[no-untyped-def]
    table, current, counts, sums, programs,
    SOURCE: tl.constexpr, FP8_MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, MAGIC: tl.constexpr,
    E4M3_MAX: tl.constexpr, E4M3_MIN_NORMAL: tl.constexpr, E4M3_MAGIC: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.program_id(1)
    row = table + tensor * 5
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    scales = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    tiles = tl.load(row + 2)
    length = tl.load(row + 3)
    mode = tl.load(row + 4)
    own = tl.load(current + tensor)
    own_inverse = 1.0 / own
    a_row = (length + 127) // 128

    before = tl.zeros([TILES * 4, 32], tl.int32)
    saturated_1 = tl.zeros([TILES * 4, 32], tl.int32)
    saturated_2 = tl.zeros([TILES * 4, 32], tl.int32)
    saturated_3 = tl.zeros([TILES * 4, 32], tl.int32)
    saturated_4 = tl.zeros([TILES * 4, 32], tl.int32)
    saturated_5 = tl.zeros([TILES * 4, 32], tl.int32)
    after_1 = tl.zeros([TILES * 4, 32], tl.int32)
    after_2 = tl.zeros([TILES * 4, 32], tl.int32)
    after_3 = tl.zeros([TILES * 4, 32], tl.int32)
    after_4 = tl.zeros([TILES * 4, 32], tl.int32)
    after_5 = tl.zeros([TILES * 4, 32], tl.int32)
    square = tl.zeros([TILES * 4, 32], tl.float32)
    error_1 = tl.zeros([TILES * 4, 32], tl.float32)
    error_2 = tl.zeros([TILES * 4, 32], tl.float32)
    error_3 = tl.zeros([TILES * 4, 32], tl.float32)
    error_4 = tl.zeros([TILES * 4, 32], tl.float32)
    error_5 = tl.zeros([TILES * 4, 32], tl.float32)

    part = tl.arange(0, TILES * 4)
    inner = ((part % 4) * 32)[:, None] + tl.arange(0, 32)[None, :]
    start = program.to(tl.int64) * TILES
    while start < tiles:
        tile = start + (part // 4).to(tl.int64)
        line = (tile // a_row)[:, None]
        place = ((tile % a_row) * 128)[:, None] + inner
        inside = (tile < tiles)[:, None] & (place < length)
        x = tl.load(source + line * length + place, mask=inside, other=0.0).to(tl.float32)
        index = tl.where(mode == 1, line + place * 0, tl.where(mode == 2, place, 0))
        scale = tl.load(scales + index, mask=inside, other=1.0)
        before += (x != 0.0).to(tl.int32)
        square += x * x
        half = scale * 0.5
        inverse = 1.0 / half
        s, a, e = _lost(x, half, inverse, FP8_MAX, MIN_NORMAL, MAGIC)
        saturated_1 += s
        after_1 += a
        error_1 += e
        s, a, e = _lost(x, scale * 0.25, inverse * 2.0, FP8_MAX, MIN_NORMAL, MAGIC)
        saturated_2 += s
        after_2 += a
        error_2 += e
        s, a, e = _lost(x, own, own_inverse, FP8_MAX, MIN_NORMAL, MAGIC)
        saturated_3 += s
        after_3 += a
        error_3 += e
        magnitude = tl.where(x != x, 0.0, tl.abs(x))
        short = tl.max(magnitude, 1)
        long = tl.max(tl.reshape(short, [TILES, 4]), 1)
        power = _tile_power(long)
        power = tl.reshape(tl.broadcast_to(power[:, None], [TILES, 4]), [TILES * 4])
        s, a, e = _lost(
            x, (power << 23).to(tl.float32, bitcast=True)[:, None],
            ((254 - power) << 23).to(tl.float32, bitcast=True)[:, None], E4M3_MAX, E4M3_MIN_NORMAL, E4M3_MAGIC,
        )  # fmt: skip
        saturated_4 += s
        after_4 += a
        error_4 += e
        power = _tile_power(short)
        s, a, e = _lost(
            x, (power << 23).to(tl.float32, bitcast=True)[:, None],
            ((254 - power) << 23).to(tl.float32, bitcast=True)[:, None], E4M3_MAX, E4M3_MIN_NORMAL, E4M3_MAGIC,
        )  # fmt: skip
        saturated_5 += s
        after_5 += a
        error_5 += e
        start += programs * TILES

    to = counts + (tensor * programs + program) * 11
    tl.store(to, tl.sum(before).to(tl.int64))
    tl.store(to + 1, tl.sum(saturated_1).to(tl.int64))
    tl.store(to + 2, tl.sum(saturated_2).to(tl.int64))
    tl.store(to + 3, tl.sum(saturated_3).to(tl.int64))
    tl.store(to + 4, tl.sum(saturated_4).to(tl.int64))
    tl.store(to + 5, tl.sum(saturated_5).to(tl.int64))
    tl.store(to + 6, tl.sum(after_1).to(tl.int64))
    tl.store(to + 7, tl.sum(after_2).to(tl.int64))
    tl.store(to + 8, tl.sum(after_3).to(tl.int64))
    tl.store(to + 9, tl.sum(after_4).to(tl.int64))
    tl.store(to + 10, tl.sum(after_5).to(tl.int64))
    to = sums + (tensor * programs + program) * 6
    tl.store(to, tl.sum(square))
    tl.store(to + 1, tl.sum(error_1))
    tl.store(to + 2, tl.sum(error_2))
    tl.store(to + 3, tl.sum(error_3))
    tl.store(to + 4, tl.sum(error_4))
    tl.store(to + 5, tl.sum(error_5))


def what_if_fused(items: Sequence[Item], amaxes: Sequence[torch.Tensor]) -> dict[int, WhatIfStatistics]:
    """Figures by position, without the items that the kernel cannot take."""
    groups: dict[tuple[torch.device, torch.dtype, str], list[int]] = {}
    items = [kernels.by_rows(item) for item in items]
    for i, item in enumerate(items):
        if kernels.fits(item):
            groups.setdefault((item.values.device, item.values.dtype, item.fmt.name), []).append(i)
    found: dict[int, WhatIfStatistics] = {}
    for positions in groups.values():
        results = launch([items[i] for i in positions], [amaxes[i] for i in positions])
        found.update(zip(positions, results, strict=True))
    return found


def launch(items: Sequence[Item], amaxes: Sequence[torch.Tensor]) -> list[WhatIfStatistics]:
    """Count tensors of one device, dtype and format in one launch."""
    from fp8watch.capture.statistics.what_if import WhatIfStatistics, current_scale

    fmt: Fp8Format = items[0].fmt
    device, dtype = items[0].values.device, items[0].values.dtype
    rows = []
    for item in items:
        length = item.values.shape[-1] if item.values.dim() else 1
        tiles = item.values.numel() // length * triton.cdiv(length, 128)
        mode = kernels.scale_mode(item.values, item.scale)
        rows.append((item.values.data_ptr(), item.scale.data_ptr(), tiles, length, mode))
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    current = current_scale(torch.stack([amax.detach().float().reshape(()) for amax in amaxes]), fmt)
    programs = min(MOST_PROGRAMS, triton.cdiv(max(row[2] for row in rows), TILES_A_PROGRAM))
    counts = torch.empty(len(items), programs, _COUNTS, dtype=torch.int64, device=device)
    sums = torch.empty(len(items), programs, _SUMS, dtype=torch.float32, device=device)
    kernel: Any = _what_if_kernel
    kernel[(programs, len(items))](
        table, current, counts, sums, programs,
        SOURCE=kernels.SOURCES[dtype], FP8_MAX=fmt.max, MIN_NORMAL=fmt.min_normal, MAGIC=_magic(fmt),
        E4M3_MAX=E4M3.max, E4M3_MIN_NORMAL=E4M3.min_normal, E4M3_MAGIC=_magic(E4M3), TILES=TILES,
    )  # fmt: skip
    total, squares = counts.sum(1), sums.sum(1)
    num = len(CANDIDATES)
    underflowed, saturated = total[:, :1] - total[:, num + 1 :], total[:, 1 : num + 1]
    return [
        WhatIfStatistics(
            underflowed=underflowed[i],
            saturated=saturated[i],
            squared_error=squares[i, 1:],
            squared_values=squares[i, 0],
        )
        for i in range(len(items))
    ]


def _magic(fmt: Fp8Format) -> float:
    """See `fp8watch.emulation.cast.round_to_fp8`."""
    magic: float = 1.5 * 2.0 ** (23 - fmt.mantissa_bits)
    return magic
