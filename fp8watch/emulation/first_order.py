"""Refuses a double backward at once, in the first backward.

Torch's `once_differentiable` raises in the second backward, and only if a recorded path leads there. No path leads from
a last layer's gradient to its input, so its share of a gradient penalty would silently be missing from the sum, or a
Hessian-vector product would silently be zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NO_SECOND = (
    "fp8watch.emulation: an FP8 layer has no double backward, which create_graph=True prepares (gradient penalty, "
    "Hessian-vector product): leave create_graph out if nothing is differentiated twice, else the layers that it goes "
    "through with convert(model, filter=...)"
)

Gradients = tuple[torch.Tensor | None, ...]


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Make the `backward` of an autograd function raise `RuntimeError` under `create_graph=True`, before any change."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Any) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        return backward(ctx, *gradients)

    return wrapped
