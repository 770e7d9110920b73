"""How far the optimizer moved the parameters: RMS of the update, from a strided sample of at most 65,536 elements.

The sample is copied after `optimizer.step` on the parameters' device and reduced there; nothing is waited for. The
copy made after one step serves as the one before the next, unless a parameter was written to in between (its version
counter tells), as a rollback or a swap of weights does. The same sample tells whether parameters are still finite. No
random numbers are drawn: the elements are evenly spaced, so training's RNG is untouched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

MAX_ELEMENTS = 65_536
"""Relative error of an RMS over n samples is about 1/sqrt(2n): 0.3 % at 65,536, far below what a rule looks at."""
MAX_PARAMETERS = 32
"""Parameters that take part, evenly spread through the model: each costs a kernel a step, as views are strided."""


class UpdateSize:
    """Samples parameters around an optimizer step. `before` and `after` are called in turn, on one thread."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        chosen = _spread([p for p in parameters if p.requires_grad and p.is_floating_point()])
        # Matrices first: they alone have a size that an update can be compared with (a norm's weights start at 1).
        self._parameters = sorted(chosen, key=lambda p: p.dim() < 2)
        self._num_matrix_elements = 0
        self._pointers: list[int] = []
        self._views: list[torch.Tensor] = []
        self._old: torch.Tensor | None = None
        self._new: torch.Tensor | None = None
        self._old_chunks: list[torch.Tensor] = []
        self._new_chunks: list[torch.Tensor] = []
        self._has_before = False
        self._versions: list[int] = []

    @torch.no_grad()
    def before(self) -> None:
        """Have the sample as it is now: the last one taken, or a new copy where parameters were written to since."""
        views = self._current_views()
        if views and self._versions != [p._version for p in self._parameters]:
            torch._foreach_copy_(self._old_chunks, views)
        self._has_before = bool(views)

    @torch.no_grad()
    def after(self) -> dict[str, torch.Tensor]:
        """`update_rms` (float32, 0-D; NaN where a difference is), `param_nonfinite` (1.0 or 0.0) and `update_ratio`
        (RMS of the matrices' update over the RMS of the matrices after it; absent without a matrix), on the device."""
        if not self._has_before or self._old is None or self._new is None:
            return {}
        self._has_before = False
        torch._foreach_copy_(self._new_chunks, self._current_views())
        self._versions = [p._version for p in self._parameters]
        squares = self._new.sub(self._old).square_()
        is_bad = (~torch.isfinite(self._new)).any()
        found = {"update_rms": squares.mean().sqrt(), "param_nonfinite": is_bad.to(torch.float32)}
        count = self._num_matrix_elements
        if count:
            found["update_ratio"] = (squares[:count].sum() / self._new[:count].square().sum()).sqrt()
        self._old, self._new = self._new, self._old
        self._old_chunks, self._new_chunks = self._new_chunks, self._old_chunks
        return found

    def _current_views(self) -> list[torch.Tensor]:
        """Views of the sample, made anew when a parameter's storage was replaced (`.to`, sharding, `p.data = `)."""
        locals_ = [_local(p) for p in self._parameters]
        pointers = [p.data_ptr() for p in locals_]
        if pointers == self._pointers:
            return self._views
        self._versions = []
        share = max(1, MAX_ELEMENTS // max(1, len(locals_)))
        views = [view for p in locals_ if (view := _strided(p, share)) is not None]
        if views:
            # One device only: the first one's. A model spread over devices is sampled where it begins.
            views = [view for view in views if view.device == views[0].device]
            sizes = [view.numel() for view in views]
            matrices = sum(p.dim() >= 2 for p in locals_ if p.device == views[0].device and _strided(p, 1) is not None)
            self._num_matrix_elements = sum(sizes[:matrices])
            self._old = torch.zeros(sum(sizes), dtype=torch.float32, device=views[0].device)
            self._new = torch.zeros_like(self._old)
            self._old_chunks = list(torch.split(self._old, sizes))
            self._new_chunks = list(torch.split(self._new, sizes))
        self._views, self._pointers = views, pointers
        return views


def _spread(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if len(parameters) <= MAX_PARAMETERS:
        return list(parameters)
    return [parameters[i * len(parameters) // MAX_PARAMETERS] for i in range(MAX_PARAMETERS)]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter."""
    local = getattr(parameter, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else parameter.detach()


def _strided(parameter: torch.Tensor, share: int) -> torch.Tensor | None:
    """At most `share` evenly spaced elements as a 1-D view; None where no view exists."""
    count = parameter.numel()
    if count == 0 or not parameter.is_contiguous():
        return None
    flat = parameter.detach().view(-1)
    return flat[:: max(1, -(-count // share))]
