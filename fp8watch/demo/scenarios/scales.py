"""Faults of the FP8 bookkeeping: scales that no longer fit what is cast with them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fp8watch.demo.scenarios.base import OneOff, Scenario, Setting
from fp8watch.emulation import Fp8Linear, ScalingState


def fp8_layers(model: nn.Module, layer: str | None) -> Iterator[Fp8Linear]:
    """The FP8 layers, or the one of that name."""
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear) and layer in (None, name):
            yield module


class _Stuck(ScalingState):
    """A scaling state whose update runs and whose result never reaches the scale."""

    def update(self, recipe: object, amax: torch.Tensor) -> None:
        scale = self.scale.clone()
        super().update(recipe, amax)  # type: ignore[arg-type]
        self.scale.copy_(scale)


class FrozenScale(OneOff):
    """All scales are `FACTOR` times too large, and the update stops taking effect.

    As where an update kernel writes to a buffer that the casts no longer read (a cache keyed to something that
    changed, a captured graph). What is written into the scale itself does take effect, and stays. The broken
    update belongs to the process: a rollback does not mend it.
    """

    FACTOR = 64.0

    def __init__(self, fault_step: int, layer: str | None) -> None:
        super().__init__(fault_step)
        self._layer = layer

    def happen(self, model: nn.Module) -> None:
        """Clips everything above amax / 64 from now on."""
        for module in fp8_layers(model, self._layer):
            for state in (module.scaling_forward, module.scaling_backward):
                state.scale.mul_(self.FACTOR)
                state.__class__ = _Stuck


class GradientUnderflow(OneOff):
    """Scales of the output gradients are 2^-24 of what they should be, and an infinity in the window keeps them so.

    As after one overflowing gradient or a damaged reduction: Transformer Engine leaves a scale alone while the
    maximum of its window is not finite, with the default history for 1,024 updates. A rollback, which restores
    the window, mends it.
    """

    FACTOR = 2.0**-24

    def __init__(self, fault_step: int, layer: str | None) -> None:
        super().__init__(fault_step)
        self._layer = layer

    def happen(self, model: nn.Module) -> None:
        """Most gradient elements are rounded to zero from now on."""
        for module in fp8_layers(model, self._layer):
            module.scaling_backward.scale.mul_(self.FACTOR)
            module.scaling_backward.amax_history[-1].fill_(torch.inf)


def _frozen(setting: Setting) -> FrozenScale:
    return FrozenScale(setting.fault_step, setting.layer)


def _underflow(setting: Setting) -> GradientUnderflow:
    return GradientUnderflow(setting.fault_step, setting.layer)


SCENARIOS = (
    Scenario(
        name="frozen-scale",
        family="bookkeeping",
        summary="all scales stuck 64x too large: every cast clips",
        make=_frozen,
        recurs="the scales are put off once; the update stays broken for the life of the process",
        takes_layer=True,
    ),
    Scenario(
        name="gradient-underflow",
        family="bookkeeping",
        summary="backward scales stuck 2^-24 too small: gradients round to zero",
        make=_underflow,
        recurs="once; what is restored from before is whole",
        takes_layer=True,
    ),
)
