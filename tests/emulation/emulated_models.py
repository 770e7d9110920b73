"""Small models for the emulation's tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch.emulation import DelayedScaling, Fp8Linear, convert, fp8_modules


class Block(nn.Module):
    """Norm, SwiGLU, residual."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    """Blocks, checkpointed or not (`recompute`: None, "reentrant", "plain")."""

    def __init__(self, width: int = 32, depth: int = 3, recompute: str | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.recompute is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


def make_stack(recompute: str | None = None, seed: int = 0, **recipe: Any) -> Stack:
    torch.manual_seed(seed)
    model = Stack(recompute=recompute)
    convert(model, DelayedScaling(**{"amax_history_len": 4, **recipe}))
    return model


def batch(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))


def scales(model: nn.Module, *, forward: bool) -> torch.Tensor:
    layers = fp8_modules(model)
    return torch.cat([(m.scaling_forward if forward else m.scaling_backward).scale for m in layers]).clone()


def histories(model: nn.Module) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    for module in fp8_modules(model):
        parts += [module.scaling_forward.amax_history, module.scaling_backward.amax_history]
    return torch.cat(parts, dim=1).clone()


class CountingTap:
    """Counts updates and casts."""

    def __init__(self) -> None:
        self.updates: list[bool] = []
        self.casts: list[tuple[Fp8Linear, int]] = []

    def wants_statistics(self, module: Fp8Linear) -> bool:
        return False

    def on_cast(self, module: Fp8Linear, tensor: int, *, high_precision: bool, statistics: object) -> None:
        self.casts.append((module, tensor))

    def on_update(self, modules: object, *, is_forward: bool, amax: torch.Tensor, scale: torch.Tensor) -> None:
        self.updates.append(is_forward)
