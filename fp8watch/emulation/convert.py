"""Turning a model's linear layers into FP8 layers, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from fp8watch.emulation.linear import Fp8Linear
from fp8watch.emulation.recipe import DelayedScaling
from fp8watch.emulation.region import enter, fp8_modules, leave
from fp8watch.emulation.update import AmaxGroup

_log = logging.getLogger(__name__)

Filter = Callable[[str, nn.Linear], bool]


def fits_hardware(name: str, linear: nn.Linear) -> bool:
    """FP8 GEMMs want both features divisible by 16 (cuBLASLt; Transformer Engine refuses others)."""
    return linear.in_features % 16 == 0 and linear.out_features % 16 == 0


def convert(
    model: nn.Module,
    recipe: DelayedScaling | None = None,
    *,
    filter: Filter | None = None,
    amax_group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Make every plain `nn.Linear` of `model` an `Fp8Linear`; the qualified names of those converted.

    Modules and parameters stay the same objects (only the class changes), so an optimizer made before stays
    right. Subclasses of `nn.Linear`, and layers already converted, are left alone. `filter(name, linear)`
    decides what fits; default `fits_hardware`. `model` becomes the root: its outermost call is one forward.
    `amax_group`: ranks over which amax is reduced while `recipe.reduce_amax` is set; None: all, as in
    Transformer Engine, if torch.distributed is initialised.
    """
    recipe = recipe or DelayedScaling()
    fits = filter or fits_hardware
    group = AmaxGroup(amax_group)
    converted: list[str] = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        if not fits(name, module):
            _log.info("%s (%s x %s) stays as it is", name, module.out_features, module.in_features)
            continue
        module.__class__ = Fp8Linear
        assert isinstance(module, Fp8Linear)
        module.start_fp8(recipe, group)
        converted.append(name)
    if fp8_modules(model) and enter not in model._forward_pre_hooks.values():
        # Module-level functions, so that copy.deepcopy and pickle of the model keep working.
        model.register_forward_pre_hook(enter, prepend=True)
        model.register_forward_hook(leave, always_call=True)
    return converted


__all__ = ["Filter", "convert", "fits_hardware", "fp8_modules"]
