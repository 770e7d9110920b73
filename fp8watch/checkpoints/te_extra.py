"""Transformer Engine's FP8 state in a checkpoint: its own copy is a pickle, and ours is what is restored.

TE 2.20 keeps scales and windows in the model's extra state as a pickle in a tensor of bytes, and refuses to load it
(`pytorch/_extra_state.py`, `pytorch/module/base.py` 1419) unless the environment allows pickles: a restore would stop
half-way. Our state file holds the same tensors (`FP8Controls.state_dict`), so the blobs are left out when the model is
loaded: an empty one is none to TE. A module that has not run yet has nothing for them to go to; it is given its state
first, as TE does when it loads its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fp8watch.capture.te.states import is_stateful

WRAPPER = "_checkpoint_wrapped_module."
"""In the names of modules that torch recomputes, and not in those of a state dict."""
FORWARD_SLOTS = 3
"""Of a GEMM: input, weight, output (TE 2.20 `pytorch/module/base.py` 1139)."""


def without_pickles(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with the extra state of TE's modules and operations empty; the rest as it is."""
    theirs = {
        f"{name}._extra_state".lstrip(".").replace(WRAPPER, "")
        for name, module in model.named_modules()
        if is_stateful(module)
    }
    empty = torch.empty(0, dtype=torch.uint8)
    return {key: empty if key in theirs else value for key, value in state.items()}


def make_room(
    model: torch.nn.Module, saved: Mapping[str, Any], make_recipe: Callable[..., Any] | None = None
) -> list[str]:
    """Give modules that have not run yet the state that `saved` has values for; the names of those modules.

    `saved`: `<module>/scaling_fwd` and `<module>/scaling_bwd` -> `scale` [n], `amax_history` [history_len, n].
    `make_recipe` stands in for TE's `DelayedScaling`. The module's first forward keeps the state and puts the recipe
    of its region in the place of ours.
    """
    made = []
    for name, module in model.named_modules():
        meta, forward = getattr(module, "fp8_meta", None), saved.get(f"{name}/scaling_fwd")
        if not isinstance(meta, dict) or "scaling_fwd" in meta or not isinstance(forward, Mapping):
            continue
        if make_recipe is None:
            make_recipe = importlib.import_module("transformer_engine.common.recipe").DelayedScaling
        history, scale = forward["amax_history"], forward["scale"]
        meta["num_gemms"] = scale.numel() // FORWARD_SLOTS
        meta["recipe"] = make_recipe(amax_history_len=history.shape[0])
        module.init_fp8_meta_tensors(meta["recipe"])
        made.append(name)
    return made
