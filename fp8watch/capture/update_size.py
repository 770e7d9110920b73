"""How far the optimizer moved the parameters: RMS of the update, from a strided sample of at most 65,536 elements.

The sample is gathered after `optimizer.step` on the parameters' device and reduced there to a few sums, from which the
host computes the results when they arrive. Nothing is waited for. The sample after one step is also the one before the
next, unless a parameter was written to in between (its version counter tells), by a rollback or a swap of weights. The
same sample shows whether parameters are still finite. The elements are evenly spaced: no random numbers are drawn, so
training's RNG is untouched.

On a GPU a sample costs one gather per dtype of the sampled parameters, and three or four small kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

MAX_ELEMENTS = 65_536
"""The relative error of an RMS over n samples is about 1/sqrt(2n): 0.3 % at 65,536, far below any rule's threshold."""
MAX_PARAMETERS = 32
"""Most parameters that are sampled, evenly spread through the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSums:
    """Sums over the sample of one update, on the device."""

    values: list[torch.Tensor]
    """0-D float32: 2-norms of the update of matrices and of other parameters, 2-norms of both after it, and the largest
    magnitude of all after it."""
    num_elements: int


def update_scalars(sums: Sequence[float], num_elements: int) -> dict[str, float]:
    """From `UpdateSums.values` on the host: `update_rms` (NaN if a difference is), `param_nonfinite` (1.0 or 0.0) and
    `update_ratio` (RMS of the matrices' update over the RMS of the matrices after it; absent if they are all 0)."""
    matrices, others, size, _, largest = (float(value) for value in sums)
    found = {
        "update_rms": math.sqrt((matrices * matrices + others * others) / num_elements),
        "param_nonfinite": 0.0 if math.isfinite(largest) else 1.0,
    }
    if size != 0:
        found["update_ratio"] = matrices / size
    return found


class UpdateSize:
    """Samples parameters around an optimizer step. Call `before` and `after` in turn, on one thread."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # Leave out weights that exist in FP8 only (TE's quantized tensors): a few elements would dequantize them whole.
        plain = [p for p in parameters if p.requires_grad and p.is_floating_point() and not hasattr(p, "_quantizer")]
        chosen = _spread(plain)
        # Matrices first: only their size is a reference for the update's (the weights of a norm start at 1).
        # Sorted by dtype, so that each dtype is gathered at once.
        self._parameters = sorted(chosen, key=lambda p: (p.dim() < 2, str(p.dtype)))
        self._is_sharded = any(hasattr(p, "_local_tensor") for p in self._parameters)
        self._pointers: list[int] = []
        self._runs: list[tuple[list[torch.Tensor], torch.Tensor | None]] = []
        """Views of the sampled elements by dtype, with a buffer if that is not float32."""
        self._old: _Sample | None = None
        self._new: _Sample | None = None
        self._difference: _Sample | None = None
        self._has_before = False
        self._versions: list[int] = []

    @property
    def has_before(self) -> bool:
        """Whether `before` has been called for the current update and there is something to sample."""
        return self._has_before

    @torch.no_grad()
    def before(self) -> None:
        """Make sure that the sample is current: reuse the last one, or gather again if parameters were written to."""
        if self._has_moved():
            self._prepare()
        if self._old is not None and self._versions != [p._version for p in self._parameters]:
            self._gather(self._old)
        self._has_before = self._old is not None

    @torch.no_grad()
    def after(self) -> UpdateSums | None:
        """The update since `before`, on the device; None without `before` or with nothing to sample."""
        old, new, difference = self._old, self._new, self._difference
        if not self._has_before or old is None or new is None or difference is None:
            return None
        self._has_before = False
        if self._has_moved():
            return None  # the memory was replaced, so a difference would not be an update
        self._gather(new)
        self._versions = [p._version for p in self._parameters]
        torch.sub(new.values, old.values, out=difference.values)
        norms = torch._foreach_norm([*difference.kinds, *new.kinds])
        self._old, self._new = new, old
        largest = torch.linalg.vector_norm(new.values, math.inf)
        return UpdateSums(values=[*norms, largest], num_elements=new.values.numel())

    def _gather(self, sample: _Sample) -> None:
        for (views, buffer), target in zip(self._runs, sample.runs, strict=True):
            torch.cat(views, out=target if buffer is None else buffer)
            if buffer is not None:
                target.copy_(buffer)

    def _has_moved(self) -> bool:
        """Whether a parameter's storage was replaced (`.to`, sharding, `p.data = `)."""
        held = [local_part(p) for p in self._parameters] if self._is_sharded else self._parameters
        return self._pointers != [p.data_ptr() for p in held]

    def _prepare(self) -> None:
        """Make views and buffers for the parameters' current memory."""
        locals_ = [local_part(p) for p in self._parameters]
        self._pointers = [p.data_ptr() for p in locals_]
        self._versions, self._runs, self._old, self._new = [], [], None, None
        share = max(1, MAX_ELEMENTS // max(1, len(locals_)))
        sampled = [(p, view) for p in locals_ if (view := _strided(p.detach(), share)) is not None]
        if not sampled:
            return
        # Only the first device: a model spread over several is sampled on the one that it starts on.
        device = sampled[0][1].device
        sampled = [(p, view) for p, view in sampled if view.device == device]
        runs: list[list[torch.Tensor]] = []
        for _, view in sampled:
            if runs and runs[-1][0].dtype == view.dtype:
                runs[-1].append(view)
            else:
                runs.append([view])
        sizes = [sum(view.numel() for view in views) for views in runs]
        for views, size in zip(runs, sizes, strict=True):
            dtype = views[0].dtype
            buffer = None if dtype == torch.float32 else torch.zeros(size, dtype=dtype, device=device)
            self._runs.append((views, buffer))
        num_in_matrices = sum(view.numel() for p, view in sampled if p.dim() >= 2)
        self._old, self._new, self._difference = (_Sample.of(sizes, num_in_matrices, device) for _ in range(3))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A float32 sample, with the views that each step needs, because slicing costs as much as a kernel."""

    values: torch.Tensor
    runs: list[torch.Tensor]
    kinds: list[torch.Tensor]
    """Elements of matrices, and of other parameters."""

    @staticmethod
    def of(sizes: list[int], num_in_matrices: int, device: torch.device) -> _Sample:
        """Zeros for runs of these sizes."""
        values = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        return _Sample(
            values=values, runs=list(torch.split(values, sizes)), kinds=list(values.tensor_split([num_in_matrices]))
        )  # fmt: skip


def _spread(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if len(parameters) <= MAX_PARAMETERS:
        return list(parameters)
    return [parameters[i * len(parameters) // MAX_PARAMETERS] for i in range(MAX_PARAMETERS)]


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter."""
    local = getattr(parameter, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else parameter


def _strided(parameter: torch.Tensor, share: int) -> torch.Tensor | None:
    """At most `share` evenly spaced elements as a 1-D view; None if there is no such view."""
    count = parameter.numel()
    if count == 0 or not parameter.is_contiguous():
        return None
    return parameter.view(-1)[:: max(1, -(-count // share))]
