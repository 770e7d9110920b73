"""Finds Transformer Engine's delayed-scaling state: in modules, in operations of `te.ops`, in custom recipes.

TE 2.20: a module has `fp8_meta` with `scaling_fwd` and `scaling_bwd` (`pytorch/module/base.py` 893); an operation has
`_fp8_metas` with one dictionary per mode (`pytorch/ops/op.py` 203); a custom recipe has an inner state, of only those
slots that asked for delayed scaling (`pytorch/quantization.py` 1853).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8watch.capture.te.slots import Tensor, slot_names

DIRECTIONS = (("scaling_fwd", True, "forward"), ("scaling_bwd", False, "backward"))


def metas(module: Any) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """`(key, is_forward, dictionary that holds the key)` for each direction of a TE module or operation."""
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
    """`(name, module, key, is_forward, recipe state)` for every delayed-scaling state in the model."""
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
    """`(qualified module name, tensor)` for each element of a state's scale vector; None for one without a meaning.

    In a module that mixes recipes the vector holds only the slots with delayed scaling: with a custom recipe those that
    asked for it, in attention under current scaling only S and dP (TE 2.20 `dot_product_attention.py` 1180). They are
    found by their quantizers, whose scales are views of the vector.
    """
    num_elements = state.scale.numel()
    quantizers = quantizers_of(module, key)
    if getattr(state, "_ds_state", None) is None and len(quantizers) in (0, num_elements):
        return slot_names(module, name, forward=forward, num_slots=num_elements)
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


def is_mixed(module: Any) -> bool:
    """Whether only some of a module's tensors have delayed scaling. Does not wait for the device."""
    return any(
        getattr(meta.get(key), "amax_history", None) is not None
        and len(quantizers_of(module, key)) > meta[key].scale.numel()
        for key, _, meta in metas(module)
    )


def other_tensors(module: Any, name: str) -> Iterator[tuple[str, Tensor, str]]:
    """`(qualified module name, tensor, class of its quantizer)` for tensors of a mixed module without delayed scaling.

    Boundary slots (used with FP8 outputs only) and tensors in high precision are left out.
    """
    for key, forward, meta in metas(module):
        state = meta.get(key)
        if getattr(state, "amax_history", None) is None:
            continue
        delayed = set(element_names(module, name, key, state, forward=forward))
        quantizers = quantizers_of(module, key)
        slots = slot_names(module, name, forward=forward, num_slots=len(quantizers))
        is_attention = None in slots  # its outputs are not boundary slots
        for slot, quantizer in zip(slots, quantizers, strict=True):
            kind = type(quantizer).__name__
            if slot is None or slot in delayed or kind == "IdentityQuantizer":
                continue
            if is_attention or slot[1] not in ("output", "grad_input"):
                yield *slot, kind


def quantizers_of(module: Any, key: str) -> list[Any]:
    """The quantizers of one direction, in the order of their slots."""
    held = getattr(module, "quantizers", None) or getattr(module, "_quantizers", None) or {}
    mode = "forward" if key == "scaling_fwd" else "backward"
    return list(held.get(key) or held.get(mode) or [])
