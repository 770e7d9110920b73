"""Converts a model's linear layers to FP8 layers, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from fp8watch.emulation import checks
from fp8watch.emulation.linear import Fp8Linear
from fp8watch.emulation.recipe import DelayedScaling
from fp8watch.emulation.region import enter, fp8_modules, leave
from fp8watch.emulation.update import AmaxGroup

_log = logging.getLogger(__name__)

Filter = Callable[[str, nn.Linear], bool]


def fits_hardware(name: str, linear: nn.Linear) -> bool:
    """Whether both features are divisible by 16, as FP8 GEMMs require (cuBLASLt; Transformer Engine refuses others)."""
    fits = linear.in_features % 16 == 0 and linear.out_features % 16 == 0
    return fits and checks.layer(name, linear) is None


def convert(
    model: nn.Module,
    recipe: DelayedScaling | None = None,
    *,
    filter: Filter | None = None,
    amax_group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Convert every plain `nn.Linear` of `model` to an `Fp8Linear`; returns the qualified names of those converted.

    Modules and parameters stay the same objects (only the class changes), so an optimizer made before stays valid.
    Subclasses of `nn.Linear` and converted layers are left alone. `filter(name, linear)` decides which layers are
    converted; default `fits_hardware`. `model` becomes the root: its outermost call is one forward. `amax_group`:
    ranks over which amax is reduced while `recipe.reduce_amax` is set; None: all, as in Transformer Engine, if
    torch.distributed is initialised.

    A converted layer has no double backward (`fp8watch.emulation.first_order`). Raises `TypeError` for an argument of
    the wrong type, and `ValueError`, which names them all, if `filter` accepts layers that cannot be converted; then
    nothing is converted.
    """
    checks.module("model", model)
    recipe = DelayedScaling() if recipe is None else recipe
    checks.of_kind("recipe", recipe, DelayedScaling, "fp8watch.emulation.DelayedScaling(...)")
    if filter is not None:
        checks.function("filter", filter, "filter(name, linear) that says whether a layer is converted")
    group = AmaxGroup(amax_group)
    chosen = _chosen(model, fits_hardware if filter is None else filter)
    for module in chosen.values():
        module.__class__ = Fp8Linear
        assert isinstance(module, Fp8Linear)
        module.start_fp8(recipe, group)
    if fp8_modules(model) and enter not in model._forward_pre_hooks.values():
        # Module-level functions, so that copy.deepcopy and pickle of the model keep working.
        model.register_forward_pre_hook(enter, prepend=True)
        model.register_forward_hook(leave, always_call=True)
    return list(chosen)


def _chosen(model: nn.Module, fits: Filter) -> dict[str, nn.Linear]:
    """The layers to convert, by name. Raises `ValueError` if `fits` accepts layers that cannot be converted."""
    chosen: dict[str, nn.Linear] = {}
    wrong = []
    for name, module in model.named_modules():
        if isinstance(module, nn.LazyLinear):
            _log.warning("%s is lazy and stays as it is: run one forward first, and convert the model then", name)
        if type(module) is not nn.Linear:
            continue
        if not fits(name, module):
            _log.info("%s (%s x %s) stays as it is", name, module.out_features, module.in_features)
        elif reason := checks.layer(name, module):
            wrong.append(reason)
        else:
            chosen[name] = module
    if wrong:
        raise ValueError("; ".join(wrong))
    return chosen


__all__ = ["Filter", "convert", "fits_hardware", "fp8_modules"]
