"""Gradient clipping of a model that is split into pipeline stages, by the norm over the gradients of all stages.

Each stage clips its own parameters, all by the same factor, which follows from that norm. As in torch, the norm of
several norms is their vector norm of the same order. The user's own call uses the pipeline's process group and does not
synchronise the host. When fp8watch itself clips, it uses its own group, which a missing rank cannot block forever
(`SharedNorm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

SharedNorm = Callable[[float], "list[float] | None"]
"""(norm of this stage's gradients) -> the norms of all stages, or None if the other ranks can no longer be asked."""

Measure = Callable[[list[torch.Tensor], float], torch.Tensor]
"""(gradients, order of the norm) -> their norm, a 0-d tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The pipeline of which this rank holds a stage."""

    group: Any
    """Process group with one rank of each stage."""

    def norm(self, own: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm over all stages, from this stage's norm: a collective call of all stages. 0-d, on `own`'s device."""
        norms = [torch.zeros_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(norms, own.contiguous(), group=self.group)
        return combine_norms(torch.stack(norms), norm_type)

    def clip(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
        measure: Measure,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` with the norm of all stages. Every stage must call it, also one without
        gradients."""
        parameters = list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            own = measure(gradients, norm_type).to(torch.float32)
        else:
            own = torch.zeros((), dtype=torch.float32, device=parameters[0].device if parameters else "cpu")
        norm = self.norm(own, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients of all pipeline stages is non-finite, so it "
                "cannot be clipped."
            )
        for mesh in {getattr(gradient, "device_mesh", None) for gradient in gradients}:
            some = [p for p in parameters if p.grad is not None and getattr(p.grad, "device_mesh", None) == mesh]
            clip_grads_with_norm_(some, max_norm, norm, foreach)
        return norm


def combine_norms(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of the whole from the norms of its parts (1-d), as torch combines those of single gradients."""
    combined: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    return combined
