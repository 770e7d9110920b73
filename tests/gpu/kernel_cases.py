"""Tensors on which the Triton kernels must count what torch counts; run as a program, in Triton's interpreter.

TRITON_INTERPRET=1 python tests/gpu/kernel_cases.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from interpreted import report

from fp8watch.capture.statistics import Item
from fp8watch.capture.statistics.count import TensorStatistics, count_by_torch
from fp8watch.emulation.cast import to_float8
from fp8watch.formats import E4M3, E5M2, Fp8Format

EXACT = ("quantized", "saturated", "underflowed", "zeros", "nonfinite", "amax")
SUMS = ("squared_error", "squared_values")
NAN, INF = float("nan"), float("inf")
LARGEST = torch.finfo(torch.float32).max
"""Also Transformer Engine's scale where amax asks for a larger one; its inverse is subnormal."""
SMALLEST = 2.0**-120
"""E4M3's maximum over the largest amax is a little more."""
SUBNORMAL = 1e-38


def groups(device: str, large: int) -> Iterator[list[Item]]:
    """Items of one dtype and format each, with and without the codes that a cast made."""
    for fmt in (E4M3, E5M2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            items = list(tensors(device, dtype, fmt, large))
            items.insert(-1, replace(items[-1], scale=torch.tensor(SUBNORMAL, device=device)))
            yield items
            made = [to_float8(i.values, i.scale, fmt).view(torch.uint8) for i in items]
            made[-1] = misaligned(made[-1])
            yield [replace(item, codes=codes) for item, codes in zip(items, made, strict=True)]


def tensors(device: str, dtype: torch.dtype, fmt: Fp8Format, large: int) -> Iterator[Item]:
    """Sizes that fill no block, every power of two, special values, a scale a tensor, a row and a column.

    Rows are shorter and longer than a block, and hold a multiple of 16 elements or not.
    """
    generator = torch.Generator().manual_seed(0)
    powers = torch.exp2(torch.arange(-40.0, 15.0)).to(dtype).to(device)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.0, fmt.max, -fmt.max])
    yield Item(values=torch.cat([powers, -powers * 1.5]), scale=torch.tensor(3.7, device=device), fmt=fmt)
    yield Item(values=special.to(dtype).to(device), scale=torch.tensor(1.0, device=device), fmt=fmt)
    no_number = torch.tensor([float("nan")] * 32 + [0.5] * 16)  # a thread may see nothing else
    yield Item(values=no_number.to(dtype).to(device), scale=torch.tensor(1.0, device=device), fmt=fmt)
    for shape in (
        (1,), (16,), (1023,), (7, 1025), (64, large // 64), (64, large // 1024 * 16),
        (5, 48), (7, 2, 112), (100, 16), (7, 1040),
    ):  # fmt: skip
        spread = torch.empty(shape).uniform_(-6, 2, generator=generator)
        values = (torch.randn(shape, generator=generator) * 10.0**spread).to(dtype).to(device)
        yield from with_scales(values, fmt)
    yield from with_scales(misaligned(values), fmt)
    column = fmt.max / values.float().abs().amax(0, keepdim=True).clamp(min=1e-6)
    yield Item(values=values, scale=misaligned(column), fmt=fmt)
    yield from odd_scales(device, dtype, fmt)
    yield Item(values=values, scale=torch.tensor(2.3, device=device), fmt=fmt)


def odd_scales(device: str, dtype: torch.dtype, fmt: Fp8Format) -> Iterator[Item]:
    """Scales that make NaN of zeros, or that only just have an inverse; the tensors end inside a block and a tile.

    A third of the elements is zero, another third too small or too large for most scales.
    """
    generator = torch.Generator().manual_seed(2)
    for shape in ((3, 48), (5, 33)):
        values = torch.randn(shape, generator=generator) * 10.0 ** torch.empty(shape).uniform_(-5, 4)
        values[torch.rand(shape, generator=generator) < 0.3] = 0.0
        values = values.to(dtype).to(device)
        for scale in (NAN, INF, -INF, 0.0, -2.3, LARGEST, SMALLEST):
            yield Item(values=values, scale=torch.tensor(scale, device=device), fmt=fmt)
        for dim in (0, 1):
            each = torch.full((shape[0], 1) if dim else (1, shape[1]), 2.3, device=device)
            for odd in ((NAN, 1.0), (INF, 1.0), (0.0, 1.0), (LARGEST, SMALLEST), (-2.3, 700.0)):
                scale = each.clone()
                scale.view(-1)[:2] = torch.tensor(odd)
                yield Item(values=values, scale=scale, fmt=fmt)
    no_number = values.clone()
    no_number[0, 0] = NAN
    yield Item(values=no_number, scale=torch.tensor(NAN, device=device), fmt=fmt)
    yield Item(values=torch.zeros_like(values), scale=torch.tensor(NAN, device=device), fmt=fmt)


def with_scales(values: torch.Tensor, fmt: Fp8Format) -> Iterator[Item]:
    """With one scale, one for each row, and one for each column of a matrix; some elements saturate."""
    yield Item(values=values, scale=torch.tensor(2.3, device=values.device), fmt=fmt)
    for dim in {1: (), 2: (-1, 0), 3: (-1,)}[values.dim()]:
        amax = values.float().abs().amax(dim, keepdim=True).clamp(min=1e-6)
        yield Item(values=values, scale=fmt.max / amax * 1.1, fmt=fmt)


def all_values(device: str) -> Iterator[Item]:
    """Every number of the 16-bit types. Not for the interpreter, which converts subnormal BF16 numbers wrongly."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=device).reshape(64, 1024)
    for fmt in (E4M3, E5M2):
        for dtype in (torch.bfloat16, torch.float16):
            for scale in (1.0, 3.7, 0.03):
                yield Item(values=bits.view(dtype), scale=torch.tensor(scale, device=device), fmt=fmt)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same at an address that is a multiple of the element's size only."""
    flat = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])
    return flat[1:].view(tensor.shape)


def differences(found: list[TensorStatistics], items: list[Item]) -> list[str]:
    """What is not equal: counts and amax to the bit, sums to the order of additions."""
    wrong = []
    for i, (ours, item) in enumerate(zip(found, items, strict=True)):
        reference = count_by_torch(item)
        for name in EXACT:
            if not torch.equal(getattr(ours, name), getattr(reference, name)):
                wrong.append(f"{item.fmt.name} {item.values.dtype} {i} {name}")
        for name in SUMS:
            pair = getattr(ours, name), getattr(reference, name)
            if not torch.allclose(*pair, rtol=1e-4, equal_nan=True):
                wrong.append(f"{item.fmt.name} {item.values.dtype} {i} {name}: {pair}")
    return wrong


def cast_differences(device: str, large: int) -> Iterator[str]:
    """The same of the kernel that counts one cast where it happens, and adds to what it counted before."""
    from fp8watch.capture.te import cast_kernel as kernel
    from fp8watch.capture.te.cast_rows import CastRows
    from fp8watch.capture.te.tensors import scale_of

    for items in groups(device, large):
        for i, item in enumerate(items):
            if item.codes is None or item.scale.numel() != 1:
                continue
            rows = CastRows(torch.device(device), kernel.PROGRAMS)
            row = rows.row(("module", "input"))
            inverse = item.scale.reshape(1).reciprocal()
            for _ in range(2):
                if not kernel.add(row, item.values, item.codes, inverse, fmt=item.fmt):
                    yield f"cast {item.fmt.name} {item.values.dtype} {i} was not taken"
            counts, sums = row.counts, row.sums
            once = count_by_torch(replace(item, scale=scale_of(inverse).reshape(())))
            saturated, before, after, nonfinite = counts.sum(0).tolist()
            found = {
                "saturated": saturated, "underflowed": before - after, "nonfinite": nonfinite,
                "zeros": 2 * item.values.numel() - before,
            }  # fmt: skip
            for name, number in found.items():
                if number != (wanted := 2 * int(getattr(once, name))):
                    yield f"cast {item.fmt.name} {item.values.dtype} {i} {name}: {number}, {wanted}"
            wanted = 2 * torch.stack([getattr(once, name) for name in SUMS])
            if not torch.allclose(sums.sum(0), wanted, rtol=1e-4, equal_nan=True):
                yield f"cast {item.fmt.name} {item.values.dtype} {i}: {sums.sum(0)}, {wanted}"


def main() -> int:
    from flushed_inverse import flush

    from fp8watch.capture.statistics import kernels
    from fp8watch.capture.te import cast_kernel

    flush()
    kernels.ELEMENTS_A_PROGRAM, kernels.THREADS = 4096, 128  # several programs a tensor, and blocks a program
    cast_kernel.PROGRAMS, cast_kernel.THREADS, cast_kernel.DEVICE = 3, 64, "cpu"
    items = [item for group in groups("cpu", 6400) for item in group]
    many = differences(kernels.launch(items), items)
    return report(chain(many, cast_differences("cpu", 6400)))


if __name__ == "__main__":
    sys.exit(main())
