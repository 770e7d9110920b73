"""The gradient norm before clipping: taken where gradients are complete, unscaled and not yet zeroed.

`watch.clip_grad_norm_` computes it anyway. Without that call it is taken right before the optimizer's update, or
right after it when the optimizer is given a closure (the gradients it used are those its last call left).
Gradients that a `GradScaler` still has to unscale are not observed, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import get_total_norm

SCALED = "gradients were still multiplied by the loss scale; call scaler.unscale_(optimizer) before clipping"
SHARDED = "gradients are sharded; use watch.clip_grad_norm_, which knows their layout"


def has_scaler(scaler: Any) -> bool:
    """Whether a scaler is in use; one of another make that cannot say whether it is enabled counts as enabled."""
    is_enabled = getattr(scaler, "is_enabled", None)
    return scaler is not None and (bool(is_enabled()) if callable(is_enabled) else True)


def is_scaled(optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
    """Whether gradients still carry the loss scale, asked before or inside `optimizer.step`; never waits.

    A fused optimizer gets the scale as `grad_scale` and unscales inside its kernel. Otherwise the scaler's own
    stage tells: `GradScaler.step` unscales before it calls the optimizer.
    """
    if getattr(optimizer, "grad_scale", None) is not None:
        return True
    if not has_scaler(scaler):
        return False
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None or id(optimizer) not in states:
        return True
    stage = states[id(optimizer)].get("stage")
    return getattr(stage, "name", "READY") == "READY"


def total_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor | str | None:
    """The 2-norm over all of the optimizer's gradients, on their device; a reason (str) or None without gradients.

    Semantics of `torch.nn.utils.get_total_norm`: a single non-finite element makes it non-finite.
    """
    gradients = list(_gradients(optimizer))
    if not gradients:
        return None
    if any(hasattr(gradient, "placements") for gradient in gradients):
        return SHARDED
    return get_total_norm(gradients)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                yield gradient.coalesce().values() if gradient.is_sparse else gradient
