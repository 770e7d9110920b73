"""Clips each gradient tensor to its own limit, a multiple of the mean of that tensor's recent norms.

This is for bursts in single tensors; a global limit would scale all tensors down. It follows AdaGC (arXiv 2502.11034):
each norm is limited to `ratio` times an exponential moving average of the norms after clipping, so that a burst hardly
moves its own limit. In the first updates, the smallest norm seen replaces the mean. Everything stays on the device.
"""

from __future__ import annotations

import itertools

import torch

MEMORY = 0.98
"""Decay of the mean (AdaGC's beta)."""
YOUNG_UPDATES = 8
"""First updates, in which the smallest norm replaces the mean, because the action may begin during a burst."""
_numbers = itertools.count(1)
TINY = 1e-30
"""A norm below this counts as zero and sets no limit."""


class TensorClip:
    """Limits the norm of each gradient of an optimizer. Exists as long as the action that made it is in force."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.number = next(_numbers)
        """Identifies this object among others of the process."""
        self.updates = 0
        """Number of updates so far."""
        self.worst: torch.Tensor | None = None
        """Largest ratio of a norm after clipping to its limit in the last update (0-d); None if it had no gradients."""
        self.num_clipped: torch.Tensor | None = None
        """Number of tensors clipped in the last update (0-d); None if it had no gradients."""
        self._mean: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def clip(self, parameters: list[torch.Tensor], scale: torch.Tensor | None = None) -> None:
        """Clip, in place, every gradient above its limit. `scale`: a factor that the gradients still contain (a
        GradScaler's, which the optimizer itself removes); it may change from step to step.

        A gradient whose norm is not finite is neither clipped nor added to the mean.
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
