"""Replaces Transformer Engine's pickled FP8 state when a model is loaded; fp8watch restores its own copy.

TE 2.20 stores scales and amax histories in the model's extra state, as a pickle in a byte tensor, and refuses to load
it unless an environment variable allows pickles (`pytorch/_extra_state.py`, `pytorch/module/base.py` 1419). A restore
would stop half-way. The state file holds the same tensors (`FP8Controls.state_dict`), so the extra state is replaced by
an empty tensor, which TE ignores. A module that has not run yet has no FP8 state to restore into. It is initialised
first, as TE does when it loads its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fp8watch.capture.te.states import is_stateful

WRAPPER = "_checkpoint_wrapped_module."
"""Part of the names of modules under activation checkpointing; it is not in state dict keys."""
FORWARD_SLOTS = 3
"""Slots per GEMM: input, weight, output (TE 2.20 `pytorch/module/base.py` 1139)."""


def without_pickles(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with the extra state of TE's modules and operations empty."""
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
    """Initialise FP8 state in modules that have not run yet and have saved values. Returns their names.

    `saved`: `<module>/scaling_fwd` and `<module>/scaling_bwd` -> `scale` [n], `amax_history` [history_len, n].
    `make_recipe` replaces TE's `DelayedScaling`. The module's first forward keeps the state and replaces the recipe by
    that of its region.
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
