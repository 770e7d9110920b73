"""The gradient norm before clipping: taken when gradients are complete, unscaled and not yet zeroed.

`watch.clip_grad_norm_` computes it anyway. Without that call it is taken right before the optimizer's update, or
right after it if the optimizer is given a closure (which leaves the gradients of its last call).
Gradients that a `GradScaler` still has to unscale are not observed, and that is reported.

Optimizers and scalers are the user's objects: exceptions that they raise when inspected are caught here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from fp8watch.foreign import attribute

SCALED = "gradients were still multiplied by the loss scale; call scaler.unscale_(optimizer) before clipping"
SHARDED = "gradients are sharded; use watch.clip_grad_norm_, which knows their layout"


def has_scaler(scaler: Any) -> bool:
    """Whether a scaler is in use. A custom scaler that cannot tell whether it is enabled counts as enabled."""
    if scaler is None:
        return False
    is_enabled = attribute(scaler, "is_enabled")
    try:
        return bool(is_enabled()) if callable(is_enabled) else True
    except Exception:
        return True


def is_scaled(optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
    """Whether gradients still carry the loss scale; call it before or inside `optimizer.step`. Never waits.

    A fused optimizer gets the scale as `grad_scale` and unscales inside its kernel. Otherwise the scaler's stage tells:
    `GradScaler.step` unscales before it calls the optimizer. A scaler without a stage counts as not having unscaled.
    """
    if attribute(optimizer, "grad_scale") is not None:
        return True
    if not has_scaler(scaler):
        return False
    states = attribute(scaler, "_per_optimizer_states")
    state = states.get(id(optimizer)) if isinstance(states, Mapping) else None
    stage = state.get("stage") if isinstance(state, Mapping) else None
    return (attribute(stage, "name") or "READY") == "READY"


def total_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor | str | None:
    """2-norm over all of the optimizer's gradients, on their device; a str tells why not; None without gradients.

    Semantics of `torch.nn.utils.get_total_norm`: a single non-finite element makes it non-finite.
    """
    gradients = list(_gradients(optimizer))
    if not gradients:
        return None
    if any(attribute(gradient, "placements") is not None for gradient in gradients):
        return SHARDED
    return get_total_norm(gradients)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                yield gradient.coalesce().values() if gradient.is_sparse else gradient
