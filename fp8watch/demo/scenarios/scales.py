"""Faults of the FP8 bookkeeping: scales that no longer fit the tensors that are cast with them."""

from __future__ import annotations

import torch
from torch import nn

from fp8watch.demo.config import EngineName
from fp8watch.demo.engines import engine
from fp8watch.demo.scenarios.base import OneOff, Scenario, Setting


class FrozenScale(OneOff):
    """All scales are `FACTOR` times too large, and updates no longer take effect.

    This happens where an update kernel writes to a buffer that the casts no longer read (a cache keyed to something
    that changed, a captured graph). Values written into the scale itself do take effect, and stay. The broken update
    belongs to the process, so a rollback does not repair it.
    """

    FACTOR = 64.0

    def __init__(self, fault_step: int, layer: str | None, engine: EngineName = "emulation") -> None:
        super().__init__(fault_step)
        self._layer = layer
        self._engine: EngineName = engine

    def happen(self, model: nn.Module) -> None:
        """From now on everything above amax / 64 clips."""
        for both in engine(self._engine).scales(model, self._layer):
            for scales in both:
                scales.scale.mul_(self.FACTOR)
                scales.stick()


class GradientUnderflow(OneOff):
    """Scales of the output gradients are 2^-24 of what they should be, and an infinity in the window keeps them there.

    This happens after one overflowing gradient or a damaged reduction: Transformer Engine leaves a scale alone while
    the maximum of its window is not finite, with the default history for 1,024 updates. A rollback restores the window
    and repairs it.
    """

    FACTOR = 2.0**-24

    def __init__(self, fault_step: int, layer: str | None, engine: EngineName = "emulation") -> None:
        super().__init__(fault_step)
        self._layer = layer
        self._engine: EngineName = engine

    def happen(self, model: nn.Module) -> None:
        """From now on most gradient elements are rounded to zero."""
        for _, backward in engine(self._engine).scales(model, self._layer):
            backward.scale.mul_(self.FACTOR)
            backward.amax_history[-1].fill_(torch.inf)


def _frozen(setting: Setting) -> FrozenScale:
    return FrozenScale(setting.fault_step, setting.layer, setting.config.engine)


def _underflow(setting: Setting) -> GradientUnderflow:
    return GradientUnderflow(setting.fault_step, setting.layer, setting.config.engine)


SCENARIOS = (
    Scenario(
        name="frozen-scale",
        family="bookkeeping",
        summary="all scales stuck 64x too large: every cast clips",
        make=_frozen,
        recurs="the scales are put off once; the update stays broken for the life of the process",
        takes_layer=True,
        needs_scales=True,
    ),
    Scenario(
        name="gradient-underflow",
        family="bookkeeping",
        summary="backward scales stuck 2^-24 too small: gradients round to zero",
        make=_underflow,
        recurs="once; what is restored from before is whole",
        takes_layer=True,
        needs_scales=True,
    ),
)
