"""Gradients that cannot be differentiated again, said at once to those who are about to.

Torch's `once_differentiable` raises in the second backward, and only where a path leads there that it has recorded.
None leads from a last layer's gradient to its input: its share of a gradient penalty would be missing from a sum, or a
Hessian-vector product zero, without a word.
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
    """The `backward` of an autograd function. Raises `RuntimeError` under `create_graph=True`, with nothing changed."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Any) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        return backward(ctx, *gradients)

    return wrapped
