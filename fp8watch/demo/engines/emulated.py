"""FP8 emulated in FP32 arithmetic by `fp8watch.emulation`, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

from fp8watch.demo.config import EngineName
from fp8watch.demo.engines.base import Region
from fp8watch.emulation import DelayedScaling, Fp8Linear, ScalingState, convert


class _Stuck(ScalingState):
    """A scaling state whose update runs but whose result never reaches the scale."""

    def update(self, recipe: object, amax: torch.Tensor) -> None:
        scale = self.scale.clone()
        super().update(recipe, amax)  # type: ignore[arg-type]
        self.scale.copy_(scale)


class _Scales:
    """`Scales` that are the emulation's own state."""

    def __init__(self, state: ScalingState) -> None:
        self._state = state
        self.scale = state.scale
        self.amax_history = state.amax_history

    def stick(self) -> None:
        """Swap the class, so that the tensors stay where the casts read them."""
        self._state.__class__ = _Stuck


class Emulation:
    """A converted model opens its region by itself, in its outermost call."""

    name: EngineName = "emulation"

    def convert(self, model: nn.Module, *, amax_history_len: int) -> Region:
        """See `Engine`."""
        recipe = DelayedScaling(amax_history_len=amax_history_len)
        convert(model, recipe, filter=lambda name, linear: name.startswith("blocks."))
        return nullcontext

    def scales(self, model: nn.Module, layer: str | None) -> Iterator[tuple[_Scales, _Scales]]:
        """See `Engine`."""
        for name, module in model.named_modules():
            if isinstance(module, Fp8Linear) and layer in (None, name):
                yield _Scales(module.scaling_forward), _Scales(module.scaling_backward)
