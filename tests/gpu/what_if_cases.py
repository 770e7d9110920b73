"""Tensors on which the what-if kernel must count what torch counts; run as a program, in Triton's interpreter.

TRITON_INTERPRET=1 python tests/gpu/what_if_cases.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from interpreted import report
from kernel_cases import tensors

from fp8watch.capture.statistics import Item
from fp8watch.capture.statistics.what_if import WhatIfStatistics, what_if_by_torch
from fp8watch.emulation.cast import measure_amax
from fp8watch.formats import E4M3, E5M2

EXACT = ("underflowed", "saturated")
SUMS = ("squared_error", "squared_values")


def groups(device: str, large: int) -> Iterator[list[Item]]:
    """Items of one dtype and format each: those of the counting kernel, and rows that end inside a tile."""
    generator = torch.Generator().manual_seed(1)
    for fmt in (E4M3, E5M2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            items = list(tensors(device, dtype, fmt, large))
            for shape in ((2, 33), (5, 128), (3, 2, 260), ()):
                spread = torch.empty(shape).uniform_(-9, 4, generator=generator)
                values = (torch.randn(shape, generator=generator) * 10.0**spread).to(dtype).to(device)
                items.append(Item(values=values, scale=torch.tensor(700.0, device=device), fmt=fmt))
            tiny = (torch.arange(-200, 200) * 2.0**-149).to(dtype).to(device)  # subnormal in float32
            items.append(Item(values=tiny, scale=torch.tensor(1.0, device=device), fmt=fmt))
            items.append(Item(values=tiny * 0, scale=torch.tensor(1.0, device=device), fmt=fmt))
            yield items


def amaxes(items: list[Item]) -> list[torch.Tensor]:
    """Of each item."""
    return [measure_amax(item.values) for item in items]


def differences(found: list[WhatIfStatistics], items: list[Item]) -> list[str]:
    """What is not equal: counts to the bit, sums to the order of additions."""
    wrong = []
    for i, (ours, item) in enumerate(zip(found, items, strict=True)):
        reference = what_if_by_torch(item, measure_amax(item.values))
        for name in (*EXACT, *SUMS):
            pair = getattr(ours, name), getattr(reference, name)
            is_equal = torch.equal(*pair) if name in EXACT else torch.allclose(*pair, rtol=2e-4, equal_nan=True)
            if not is_equal:
                wrong.append(f"{item.fmt.name} {item.values.dtype} {tuple(item.values.shape)} {i} {name}: {pair}")
    return wrong


def main() -> int:
    from flushed_inverse import flush

    from fp8watch.capture.statistics import what_if_kernels as kernels

    flush()
    kernels.TILES_A_PROGRAM, kernels.TILES[1] = 48, 16  # several programs a tensor, fewer turns of a slow loop
    items = [item for group in groups("cpu", 6400) for item in group]
    return report(differences(kernels.launch(items, amaxes(items)), items))


if __name__ == "__main__":
    sys.exit(main())
