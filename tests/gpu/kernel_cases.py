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


def groups(device: str, large: int) -> Iterator[list[Item]]:
    """Items of one dtype and format each, with and without the codes that a cast made."""
    for fmt in (E4M3, E5M2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            items = list(tensors(device, dtype, fmt, large))
            yield items
            yield [
                Item(values=i.values, scale=i.scale, fmt=fmt, codes=to_float8(i.values, i.scale, fmt).view(torch.uint8))
                for i in items
            ]


def tensors(device: str, dtype: torch.dtype, fmt: Fp8Format, large: int) -> Iterator[Item]:
    """Sizes that fill no block, every power of two, special values, a scale a tensor, a row and a column."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.exp2(torch.arange(-40.0, 15.0)).to(dtype).to(device)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.0, fmt.max, -fmt.max])
    yield Item(values=torch.cat([powers, -powers * 1.5]), scale=torch.tensor(3.7, device=device), fmt=fmt)
    yield Item(values=special.to(dtype).to(device), scale=torch.tensor(1.0, device=device), fmt=fmt)
    for shape in ((1,), (1023,), (3, 1025), (64, large // 64)):
        spread = torch.empty(shape).uniform_(-6, 2, generator=generator)
        values = (torch.randn(shape, generator=generator) * 10.0**spread).to(dtype).to(device)
        yield Item(values=values, scale=torch.tensor(2.3, device=device), fmt=fmt)
        if len(shape) == 2:
            for dim in (0, 1):
                amax = values.float().abs().amax(dim, keepdim=True).clamp(min=1e-6)
                yield Item(values=values, scale=fmt.max / amax * 1.1, fmt=fmt)


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

    for items in groups(device, large):
        for i, item in enumerate(items):
            if item.codes is None or item.scale.numel() != 1:
                continue
            rows = CastRows(torch.device(device), kernel.PROGRAMS)
            row = rows.row(("module", "input"))
            scale = item.scale.reshape(1)
            for is_inverse, given in ((False, scale), (True, scale.reciprocal())):
                if not kernel.add(row, item.values, item.codes, given, is_inverse=is_inverse, fmt=item.fmt):
                    yield f"cast {item.fmt.name} {item.values.dtype} {i} was not taken"
            counts, sums = row.counts, row.sums
            inverted = replace(item, scale=scale.reciprocal().reciprocal().reshape(()))
            twice = [count_by_torch(item), count_by_torch(inverted)]
            saturated, before, after, nonfinite = counts.sum(0).tolist()
            found = {
                "saturated": saturated, "underflowed": before - after, "nonfinite": nonfinite,
                "zeros": 2 * item.values.numel() - before,
            }  # fmt: skip
            for name, number in found.items():
                if number != (wanted := sum(int(getattr(one, name)) for one in twice)):
                    yield f"cast {item.fmt.name} {item.values.dtype} {i} {name}: {number}, {wanted}"
            wanted = torch.stack([sum(getattr(one, name) for one in twice) for name in SUMS])
            if not torch.allclose(sums.sum(0), wanted, rtol=1e-4, equal_nan=True):
                yield f"cast {item.fmt.name} {item.values.dtype} {i}: {sums.sum(0)}, {wanted}"


def main() -> int:
    from fp8watch.capture.statistics import kernels
    from fp8watch.capture.te import cast_kernel

    kernels.ELEMENTS_A_PROGRAM = 2048  # several programs a tensor
    cast_kernel.PROGRAMS, cast_kernel.BLOCK, cast_kernel.DEVICE = 3, 1024, "cpu"
    many = (line for items in groups("cpu", 6400) for line in differences(kernels.launch(items), items))
    return report(chain(many, cast_differences("cpu", 6400)))


if __name__ == "__main__":
    sys.exit(main())
