"""A limit of its own for each gradient tensor: a multiple of what that tensor's norm has been.

For bursts in single tensors, which a global limit answers by shortening all of them. After AdaGC (arXiv 2502.11034):
each norm is limited to `ratio` times an exponential mean of the norms after clipping, so that a burst moves its own
limit by little. While the mean is young the smallest norm seen stands in for it. All of it stays on the device.
"""

from __future__ import annotations

import itertools

import torch

MEMORY = 0.98
"""Decay of the mean (AdaGC's beta)."""
YOUNG_UPDATES = 8
"""Updates in which the smallest norm stands in for the mean: the action may begin in the middle of a burst."""
_numbers = itertools.count(1)
TINY = 1e-30
"""Below this a norm is that of no gradient, and sets no limit."""


class TensorClip:
    """Limits the norm of each of an optimizer's gradients. Made when the action begins, and forgotten with it."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.number = next(_numbers)
        """Tells this one from others."""
        self.updates = 0
        """Updates that it has been asked about."""
        self.worst: torch.Tensor | None = None
        """Largest norm after clipping over its limit, in the last update (0-d); None: no limit was known yet."""
        self.num_clipped: torch.Tensor | None = None
        """Tensors shortened in the last update (0-d)."""
        self._mean: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def clip(self, parameters: list[torch.Tensor], scale: torch.Tensor | None = None) -> None:
        """Shorten, in place, what is above its limit. `scale`: what the gradients are multiplied with (a GradScaler's
        that the optimizer takes off by itself); it may change from step to step.

        A norm that is not finite neither is shortened nor teaches anything.
        """
        held = [p for p in parameters if p.grad is not None and p.grad.numel() and not p.grad.is_sparse]
        self.worst = self.num_clipped = None
        self.updates += 1
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in held:
            by_device.setdefault(parameter.grad.device, []).append(parameter)  # type: ignore[union-attr]
        for device, some in by_device.items():
            self._clip(some, None if scale is None else scale.to(device))

    def _clip(self, parameters: list[torch.Tensor], scale: torch.Tensor | None) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
        if scale is not None:
            norms = norms / scale
        none = norms.new_full((), torch.nan)
        known = torch.stack([self._mean.get(id(p), none) for p in parameters])
        is_number = torch.isfinite(norms) & (norms > TINY)
        limits = torch.where(torch.isnan(known), norms, known) * self.ratio
        factors = torch.where(is_number, (limits / norms).clamp(max=1.0), 1.0)
        torch._foreach_mul_(gradients, [factor.to(g.dtype) for factor, g in zip(factors, gradients, strict=True)])
        after = norms * factors
        younger = torch.where(torch.isnan(known), after, torch.minimum(known, after))
        older = MEMORY * known + (1.0 - MEMORY) * after
        taught = younger if self.updates <= YOUNG_UPDATES else torch.where(torch.isnan(known), after, older)
        for parameter, mean in zip(parameters, torch.where(is_number, taught, known), strict=True):
            self._mean[id(parameter)] = mean
        measured = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
        if scale is not None:
            measured = measured / scale
        over = torch.where(is_number & ~torch.isnan(known), measured / limits, 0.0).max()
        clipped = (factors < 1.0).sum()
        self.worst = over if self.worst is None else torch.maximum(self.worst, over.to(self.worst.device))
        self.num_clipped = (
            clipped if self.num_clipped is None else self.num_clipped + clipped.to(self.num_clipped.device)
        )
