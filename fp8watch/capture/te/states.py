"""Where Transformer Engine keeps delayed scaling's state: in modules, in operations of `te.ops`, in custom recipes.

TE 2.20: a module has `fp8_meta` with `scaling_fwd` and `scaling_bwd` (`pytorch/module/base.py` 893), an operation
`_fp8_metas` with one dictionary a mode (`pytorch/ops/op.py` 203), a custom recipe an inner state of those slots only
that asked for delayed scaling (`pytorch/quantization.py` 1853).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8watch.capture.te.slots import Tensor, slot_names

DIRECTIONS = (("scaling_fwd", True, "forward"), ("scaling_bwd", False, "backward"))


def metas(module: Any) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """`(key, is_forward, dictionary that holds it)` of each direction of a module or operation of TE's."""
    both = getattr(module, "fp8_meta", None)
    modes = getattr(module, "_fp8_metas", None)
    for key, forward, mode in DIRECTIONS:
        found = both if isinstance(both, dict) else modes.get(mode) if isinstance(modes, dict) else None
        if isinstance(found, dict):
            yield key, forward, found


def is_stateful(module: Any) -> bool:
    """Whether the module may hold FP8 state, now or later."""
    return isinstance(getattr(module, "fp8_meta", None), dict) or hasattr(module, "_fp8_metas")


def delayed_states(model: torch.nn.Module) -> Iterator[tuple[str, Any, str, bool, Any]]:
    """`(name, module, key, is_forward, recipe state)` of every delayed-scaling state in the model."""
    for name, module in model.named_modules():
        for key, forward, meta in metas(module):
            state = meta.get(key)
            if getattr(state, "amax_history", None) is not None and getattr(state, "scale", None) is not None:
                yield name, module, key, forward, state


def recipe_of(module: Any, *, forward: bool) -> Any | None:
    """The recipe object that a module's delayed scaling follows."""
    for key, is_forward, meta in metas(module):
        if is_forward == forward:
            return getattr(meta.get(key), "_inner_delayed_scaling_recipe", None) or meta.get("recipe")
    return None


def element_names(module: Any, name: str, key: str, state: Any, *, forward: bool) -> list[tuple[str, Tensor] | None]:
    """What each element of a state's scale vector is; None for one without a meaning.

    The vector of a custom recipe holds the slots with delayed scaling only: they are told by their quantizers, whose
    scales are views of it.
    """
    num_elements = state.scale.numel()
    if getattr(state, "_ds_state", None) is None:
        return slot_names(module, name, forward=forward, num_slots=num_elements)
    quantizers = quantizers_of(module, key)
    slots = slot_names(module, name, forward=forward, num_slots=len(quantizers))
    found: list[tuple[str, Tensor] | None] = [None] * num_elements
    start, size = state.scale.data_ptr(), state.scale.element_size()
    for quantizer, slot in zip(quantizers, slots, strict=True):
        scale = getattr(quantizer, "scale", None)
        if isinstance(scale, torch.Tensor) and scale.numel():
            position = (scale.data_ptr() - start) // size
            if 0 <= position < num_elements:
                found[position] = slot
    return found


def quantizers_of(module: Any, key: str) -> list[Any]:
    """The quantizers of one direction, in the order of their slots."""
    held = getattr(module, "quantizers", None) or getattr(module, "_quantizers", None) or {}
    mode = "forward" if key == "scaling_fwd" else "backward"
    return list(held.get(key) or held.get(mode) or [])
