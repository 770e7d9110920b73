"""How much of a model runs in FP8, by parameters, and which linear layers were left out.

Depending on the library, a layer whose sizes do not fit the hardware is refused or silently left in high precision;
the user should know. Measured at attach and again now and then, because layers may be converted later.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

MULTIPLE = 16
"""Both sizes of an FP8 GEMM must be multiples of this (cuBLASLt; 8 and 16 in Transformer Engine, 16 in torchao)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Share:
    """How much of the model's linear layers is in FP8."""

    parameters: float
    """Share of the linear layers' weights that FP8 layers hold; 0 without linear layers."""
    left_out: list[str]
    """`name: sizes, reason` of each plain linear layer."""


def fp8_share(model: torch.nn.Module, fp8_modules: Collection[str]) -> Fp8Share:
    """`fp8_modules`: qualified names of the FP8 layers. Shared weights count once. Reads no data."""
    held, total = 0, 0
    seen: set[int] = set()
    left_out = []
    for name, module in model.named_modules():
        is_fp8 = name in fp8_modules
        if not is_fp8 and not isinstance(module, torch.nn.Linear):
            continue
        weights = [p for p in module.parameters(recurse=False) if p.dim() > 1 and id(p) not in seen]
        seen.update(map(id, weights))
        size = sum(math.prod(p.shape) for p in weights)
        total += size
        if is_fp8:
            held += size
        elif weights:
            rows, columns = weights[0].shape[0], weights[0].shape[1]
            odd = [str(each) for each in (rows, columns) if each % MULTIPLE]
            why = f"{' and '.join(odd)} not a multiple of {MULTIPLE}" if odd else "not converted"
            left_out.append(f"{name}: {rows} x {columns}, {why}")
    return Fp8Share(parameters=held / total if total else 0.0, left_out=left_out)
