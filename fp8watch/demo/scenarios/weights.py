"""Faults in the memory that holds the weights."""

from __future__ import annotations

import torch
from torch import nn

from fp8watch.demo.scenarios.base import OneOff, Scenario, Setting


class BitFlip(OneOff):
    """One weight of one layer is 2^20 times what it was, as when a bit of its exponent flips."""

    FACTOR = 2.0**20

    def __init__(self, fault_step: int, layer: str, seed: int) -> None:
        super().__init__(fault_step)
        self._layer = layer
        self._seed = seed

    @torch.no_grad()
    def happen(self, model: nn.Module) -> None:
        """Flip a weight of at least ordinary size: a flip in a weight near zero shows nowhere."""
        weight = model.get_submodule(self._layer).weight
        assert isinstance(weight, torch.Tensor)
        flat = weight.view(-1)
        ordinary = (flat.abs() >= flat.abs().median()).nonzero().view(-1)
        generator = torch.Generator().manual_seed(self._seed)
        place = ordinary[int(torch.randint(len(ordinary), (), generator=generator))]
        flat[place] *= self.FACTOR


def _flip(setting: Setting) -> BitFlip:
    assert setting.layer is not None
    return BitFlip(setting.fault_step, setting.layer, setting.config.seed)


SCENARIOS = (
    Scenario(
        name="bit-flip",
        family="hardware",
        summary="one weight x 2^20",
        make=_flip,
        recurs="once; what is restored from before is whole",
        layer="blocks.1.attention.qkv",
        takes_layer=True,
    ),
)
