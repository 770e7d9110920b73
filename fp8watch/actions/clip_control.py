"""Clipping of the gradient norm with a limit of ours beside the user's: the lower one holds.

`clip_grad_norm_` is torch's own function called with that limit, so the result is bit-identical to torch's for
the same limit. Where the loop never clips, `before_step` does it inside the optimizer wrapper. Of sharded gradients
(DTensor) torch computes the norm of the whole over all ranks; what is kept of it is reduced likewise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fp8watch.checkpoints.sharding import is_sharded

CLIP_WINDOW = 300
"""Steps over which the share of clipped ones is taken: a clip that fires in more than 5 % of them is a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipReading:
    """What clipping saw in one step. `norm` is a 0-d tensor on the gradients' device, before clipping."""

    norm: torch.Tensor
    limit: float | None
    """The limit in force; None: measured only, nothing clipped."""
    num_gradients: int
    """Gradients that the norm is of; 0 while nobody asks (`ClipControl.counts_gradients`)."""
    by_user: bool


def whole(norm: torch.Tensor) -> torch.Tensor:
    """A norm over all ranks that hold a part of what it is of. For a DTensor a collective call; else nothing."""
    sharded: Any = norm
    found: torch.Tensor = sharded.full_tensor() if is_sharded(norm) else norm
    return found


class ClipControl:
    """The clip limit of one optimizer's gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._limit: float | None = None
        self._user_limit: float | None = None
        self._readings: list[ClipReading] = []
        self._last: ClipReading | None = None
        self._recent_norms: deque[torch.Tensor] = deque(maxlen=8)
        self._clipped: deque[torch.Tensor] = deque(maxlen=CLIP_WINDOW)
        self._calls = 0
        self._is_clipped = False
        self._verify = False
        self._norm_after: torch.Tensor | None = None
        self.counts_gradients = False
        """Whether readings say how many gradients they are of: looking at each parameter's takes a while."""

    @property
    def limit(self) -> float | None:
        """Our limit; None: only the user's holds."""
        return self._limit

    def set_limit(self, limit: float | None) -> None:
        """Set or lift our limit, from the next clip on; the next clip is verified by measuring the norm again."""
        self._limit = limit
        self._verify = limit is not None
        self._norm_after = None
        self._clipped.clear()

    @property
    def user_limit(self) -> float | None:
        """What the loop asked for in its last call; None: it never clipped."""
        return self._user_limit

    @property
    def calls(self) -> int:
        """Clips so far, by the loop or by us."""
        return self._calls

    @property
    def last(self) -> ClipReading | None:
        """The last clip, in this step or an earlier one."""
        return self._last

    @property
    def norm_after(self) -> torch.Tensor | None:
        """Norm measured after the first clip under the present limit; None: no clip since."""
        return self._norm_after

    @property
    def current(self) -> ClipReading | None:
        """What was clipped since the last `take`, calls for several sets of parameters combined."""
        if not self._readings:
            return None
        if len(self._readings) == 1:
            return self._readings[0]
        norms = torch.stack([reading.norm.to(self._readings[0].norm.device) for reading in self._readings])
        limits = [reading.limit for reading in self._readings if reading.limit is not None]
        return ClipReading(
            norm=torch.linalg.vector_norm(norms),
            limit=min(limits, default=None),
            num_gradients=sum(reading.num_gradients for reading in self._readings),
            by_user=any(reading.by_user for reading in self._readings),
        )

    def take(self) -> ClipReading | None:
        """`current`, and begin a new step. The core calls it once at each boundary."""
        reading = self.current
        self._readings = []
        return reading

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` with the lower of the two limits; the norm before clipping, a 0-d tensor."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._user_limit = float(max_norm)
        limit = self._user_limit if self._limit is None else min(self._user_limit, self._limit)
        norm = torch_clip_grad_norm_(parameters, limit, norm_type, error_if_nonfinite, foreach)
        self._is_clipped = True
        self._note(norm, limit, parameters, norm_type, by_user=True)
        return norm

    def before_step(self) -> None:
        """In the optimizer wrapper, before the skip guard: clip where the loop did not, if we have a limit."""
        is_clipped, self._is_clipped = self._is_clipped, False
        if self._limit is None or is_clipped:
            return
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        norm = get_total_norm([p.grad for p in parameters])
        # A GradScaler with a fused optimizer leaves the gradients scaled and hands the scale to the kernel.
        grad_scale = getattr(self._optimizer, "grad_scale", None)
        if grad_scale is not None:
            norm = norm / grad_scale.to(norm.device)
        clip_grads_with_norm_(parameters, self._limit, norm)
        self._note(norm, self._limit, parameters, 2.0, by_user=False, grad_scale=grad_scale)

    def measure(self) -> torch.Tensor | None:
        """Total norm of the optimizer's gradients now (0-d), without clipping; None when there are none."""
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        return whole(get_total_norm(gradients)) if gradients else None

    def recent_norms(self) -> list[float]:
        """The last norms, oldest first. Reads tensors: for an action, not for each step."""
        return [float(norm) for norm in self._recent_norms]

    def clipped_ratio(self) -> float | None:
        """Share of clips under our limit, of the last 300, that shortened the gradient; None before the first.

        Reads tensors: for a read-back, not for each step.
        """
        if not self._clipped:
            return None
        return float(torch.stack(list(self._clipped)).to(torch.float32).mean())

    def _note(
        self,
        norm: torch.Tensor,
        limit: float,
        parameters: list[torch.Tensor],
        norm_type: float,
        *,
        by_user: bool,
        grad_scale: torch.Tensor | None = None,
    ) -> None:
        gradients: list[torch.Tensor] = []
        if self.counts_gradients or self._verify:
            gradients = [p.grad for p in parameters if p.grad is not None]
        norm = whole(norm)
        self._last = ClipReading(norm=norm, limit=limit, num_gradients=len(gradients), by_user=by_user)
        self._readings.append(self._last)
        self._recent_norms.append(norm)
        self._calls += 1
        if self._limit is not None:
            self._clipped.append(norm > limit)
        if self._verify and gradients:
            after = whole(get_total_norm(gradients, norm_type))
            self._norm_after = after if grad_scale is None else after / grad_scale.to(after.device)
            self._verify = False
