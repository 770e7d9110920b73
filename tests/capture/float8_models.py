"""torchao models on the CPU (its emulated GEMMs), and the expected values of their casts, computed by plain hooks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

pytest.importorskip("torchao", reason="torchao is not installed")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks(recipe: str = "tensorwise", num: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = nn.Sequential(*[Block() for _ in range(num)])
    return convert_to_float8_training(model, config=config)


def batch(seed: int, factor: float = 1.0) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) * factor


def train(run: nn.Module, seed: int, factor: float = 1.0) -> torch.Tensor:
    output = run(batch(seed, factor))
    output.square().sum().backward()
    return output


def expected(model: nn.Module, seeds: list[int], factors: list[float]) -> dict[str, list[float]]:
    """`module:tensor` -> amax of each micro-batch, by hooks on a model that nothing watches."""
    seen: dict[str, list[float]] = {}

    def watch(name: str, layer: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen.setdefault(f"{name}:input", []).append(args[0].abs().max().item())
            seen.setdefault(f"{name}:weight", []).append(layer.weight.abs().max().item())

        def after(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            output.register_hook(
                lambda grad: seen.setdefault(f"{name}:grad_output", []).append(grad.abs().max().item())
            )

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            watch(name, layer)
    for seed, factor in zip(seeds, factors, strict=True):
        train(model, seed, factor)
    return seen
