"""How far the optimizer moved the parameters: RMS of the update, from a strided sample of at most 65,536 elements.

The sample is gathered after `optimizer.step` on the parameters' device and reduced there to a few sums; what they mean
is worked out on the host, when they have arrived. Nothing is waited for. The sample taken after one step serves as the
one before the next, unless a parameter was written to in between (its version counter tells), as a rollback or a swap
of weights does. The same sample tells whether parameters are still finite. No random numbers are drawn: the elements
are evenly spaced, so training's RNG is untouched.

On a GPU a sample costs one gather for each dtype among the sampled parameters, and three or four small kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

MAX_ELEMENTS = 65_536
"""Relative error of an RMS over n samples is about 1/sqrt(2n): 0.3 % at 65,536, far below what a rule looks at."""
MAX_PARAMETERS = 32
"""Parameters that take part, evenly spread through the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSums:
    """What a device says of one update."""

    values: list[torch.Tensor]
    """0-D float32: 2-norms of the update of matrices and of other parameters, 2-norms of both after it, and the largest
    magnitude of all after it."""
    num_elements: int


def update_scalars(sums: Sequence[float], num_elements: int) -> dict[str, float]:
    """`update_rms` (NaN where a difference is), `param_nonfinite` (1.0 or 0.0) and `update_ratio` (RMS of the matrices'
    update over the RMS of the matrices after it; absent where they are 0) from `UpdateSums.values` on the host."""
    matrices, others, size, _, largest = (float(value) for value in sums)
    found = {
        "update_rms": math.sqrt((matrices * matrices + others * others) / num_elements),
        "param_nonfinite": 0.0 if math.isfinite(largest) else 1.0,
    }
    if size != 0:
        found["update_ratio"] = matrices / size
    return found


class UpdateSize:
    """Samples parameters around an optimizer step. `before` and `after` are called in turn, on one thread."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # Weights that exist in FP8 only (TE's quantized tensors) would be dequantized whole for a few elements.
        plain = [p for p in parameters if p.requires_grad and p.is_floating_point() and not hasattr(p, "_quantizer")]
        chosen = _spread(plain)
        # Matrices first: they alone have a size that an update can be compared with (a norm's weights start at 1).
        # Within them by dtype, so that each is gathered at once.
        self._parameters = sorted(chosen, key=lambda p: (p.dim() < 2, str(p.dtype)))
        self._is_sharded = any(hasattr(p, "_local_tensor") for p in self._parameters)
        self._pointers: list[int] = []
        self._runs: list[tuple[list[torch.Tensor], torch.Tensor | None]] = []
        """Views of the sample by dtype, and a buffer of theirs where that is not float32."""
        self._old: _Sample | None = None
        self._new: _Sample | None = None
        self._difference: _Sample | None = None
        self._has_before = False
        self._versions: list[int] = []

    @property
    def has_before(self) -> bool:
        """Whether `before` has been called for the update under way, and `after` has something to do."""
        return self._has_before

    @torch.no_grad()
    def before(self) -> None:
        """Have the sample as it is now: the last one taken, or a new one where parameters were written to since."""
        if self._has_moved():
            self._prepare()
        if self._old is not None and self._versions != [p._version for p in self._parameters]:
            self._gather(self._old)
        self._has_before = self._old is not None

    @torch.no_grad()
    def after(self) -> UpdateSums | None:
        """The update since `before`, on the device; None where there was none or nothing to sample."""
        old, new, difference = self._old, self._new, self._difference
        if not self._has_before or old is None or new is None or difference is None:
            return None
        self._has_before = False
        if self._has_moved():
            return None  # other memory now: what lies there is no update of what was sampled
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
        held = [_local(p) for p in self._parameters] if self._is_sharded else self._parameters
        return self._pointers != [p.data_ptr() for p in held]

    def _prepare(self) -> None:
        """Views and buffers for the parameters as they lie now."""
        locals_ = [_local(p) for p in self._parameters]
        self._pointers = [p.data_ptr() for p in locals_]
        self._versions, self._runs, self._old, self._new = [], [], None, None
        share = max(1, MAX_ELEMENTS // max(1, len(locals_)))
        sampled = [(p, view) for p in locals_ if (view := _strided(p.detach(), share)) is not None]
        if not sampled:
            return
        # One device only: the first one's. A model spread over devices is sampled where it begins.
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
    """float32, with the views that a step needs of it: slicing costs as much as a kernel."""

    values: torch.Tensor
    runs: list[torch.Tensor]
    kinds: list[torch.Tensor]
    """Of matrices, and of other parameters."""

    @staticmethod
    def of(sizes: list[int], num_in_matrices: int, device: torch.device) -> _Sample:
        """Zeros for runs of these sizes."""
        values = torch.zeros(sum(sizes), device=device)
        return _Sample(
            values=values, runs=list(torch.split(values, sizes)), kinds=list(values.tensor_split([num_in_matrices]))
        )  # fmt: skip


def _spread(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if len(parameters) <= MAX_PARAMETERS:
        return list(parameters)
    return [parameters[i * len(parameters) // MAX_PARAMETERS] for i in range(MAX_PARAMETERS)]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter."""
    local = getattr(parameter, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else parameter


def _strided(parameter: torch.Tensor, share: int) -> torch.Tensor | None:
    """At most `share` evenly spaced elements as a 1-D view; None where no view exists."""
    count = parameter.numel()
    if count == 0 or not parameter.is_contiguous():
        return None
    return parameter.view(-1)[:: max(1, -(-count // share))]
