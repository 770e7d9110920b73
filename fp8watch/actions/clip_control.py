"""Gradient norm clipping with a limit set by fp8watch beside the user's: the lower one applies.

`clip_grad_norm_` calls torch's own function with that limit, so the result is bit-identical to torch's for the same
limit. While our limit is set, `before_step` (inside the optimizer wrapper) clips all of the optimizer's gradients,
unless one single clip of the loop covered all of them as they are now (a loop may never clip, clip only some or in
several calls, or change gradients afterwards). Which gradients a clip covered is recognised by the tensors and their
version counters, which a change through `.data` does not increase. For sharded gradients (DTensor) torch computes the
norm of the whole over all ranks, and so do the norms kept here. For a pipeline whose stages are known (`mesh=`) the
norm is that of all stages (`fp8watch.actions.stages`).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fp8watch.actions.stages import SharedNorm, Stages, combine_norms
from fp8watch.actions.tensor_clip import TensorClip
from fp8watch.checkpoints.sharding import is_sharded, local_of

CLIP_WINDOW = 300
"""Steps over which the share of clipped steps is taken: if that is above 5 %, clipping stalls the training."""


class ClipReading(msgspec.Struct, frozen=True, kw_only=True):
    """What was clipped in one step. `norm` is the norm before clipping, a 0-d tensor on the gradients' device."""

    norm: torch.Tensor
    limit: float | None
    """The limit in force; None: the norm was only measured."""
    by_user: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """The gradients covered by one clip, as it left them, and their norm before it."""

    norm: torch.Tensor
    norm_type: float
    gradients: dict[int, tuple[torch.Tensor, int]]
    """id -> the tensor (held, so that its id is not reused) and its version."""

    def touched(self, gradients: list[torch.Tensor]) -> bool:
        """Whether this clip covered any of these gradients, even if they have changed since."""
        return any(id(gradient) in self.gradients for gradient in gradients)

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether this clip covered the gradient and it is unchanged since."""
        known = self.gradients.get(id(gradient))
        return known is not None and known[1] == version(gradient) >= 0


def version(gradient: torch.Tensor) -> int:
    """How often a tensor was changed in place, also through its shard; -1 where torch does not count."""
    try:
        local = getattr(gradient, "_local_tensor", None)
        return gradient._version + (local._version if isinstance(local, torch.Tensor) else 0)
    except RuntimeError:  # tensors made in inference mode
        return -1


def total_norm(gradients: list[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """`torch.nn.utils.get_total_norm`, but also for gradients on several device meshes, which torch refuses to mix."""
    meshes: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        meshes.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    if len(meshes) == 1:
        return get_total_norm(gradients, norm_type)
    norms = [whole(get_total_norm(some, norm_type)) for some in meshes.values()]
    return combine_norms(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All gradients that an optimizer would use now, except empty ones: those have no largest element."""
    return [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p.grad.numel()
    ]


def wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` cannot be called without a closure, as of `torch.optim.LBFGS`: it makes its gradients inside."""
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def local_values(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a gradient: the stored values of a sparse one, the shard of a DTensor, else itself."""
    held = local_of(gradient)
    return held.coalesce().values() if held.is_sparse else held


def whole(norm: torch.Tensor) -> torch.Tensor:
    """The norm reduced over all ranks that hold a part of the tensor: a collective call for a DTensor, else a no-op."""
    sharded: Any = norm
    found: torch.Tensor = sharded.full_tensor() if is_sharded(norm) else norm
    return found


def _whole_norm(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    return whole(total_norm(gradients, norm_type))


class ClipControl:
    """The clip limit of one optimizer's gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, stages: Stages | None = None) -> None:
        """`stages`: given when the model is split into pipeline stages."""
        self._optimizer = optimizer
        self._stages = stages
        self.share_norm: SharedNorm | None = None
        """Exchanges the stages' norms before an optimizer step, while our limit is set."""
        self.tensors: TensorClip | None = None
        """Limits of single gradient tensors, applied after that of the whole norm; None: there are none."""
        self._limit: float | None = None
        self._user_limit: float | None = None
        self._readings: list[ClipReading] = []
        self._last: ClipReading | None = None
        self._recent_norms: deque[torch.Tensor] = deque(maxlen=8)
        self._clipped: deque[torch.Tensor] = deque(maxlen=CLIP_WINDOW)
        self._calls = 0
        self._covers: list[Cover] = []
        self._verify = False
        self._failure: str | None = None
        self._norm_after: torch.Tensor | None = None
        self.keeps_covers = False
        """Whether clips note which gradients they cover even without a limit of ours. Off by default: it costs time."""

    @property
    def limit(self) -> float | None:
        """Our limit; None: only the user's applies."""
        return self._limit

    def set_limit(self, limit: float | None) -> None:
        """Set or remove our limit from the next clip on. That clip is verified by measuring the norm again."""
        self._limit = limit
        self._verify = limit is not None
        self._norm_after = None
        self._clipped.clear()

    @property
    def user_limit(self) -> float | None:
        """The limit of the loop's last call; None: it never clipped."""
        return self._user_limit

    @property
    def calls(self) -> int:
        """Number of clips so far, by the loop or by us."""
        return self._calls

    @property
    def last(self) -> ClipReading | None:
        """The last clip, in this step or an earlier one."""
        return self._last

    @property
    def norm_after(self) -> torch.Tensor | None:
        """Norm of what the optimizer got in the first update under the current limit; None before it."""
        return self._norm_after

    @property
    def failure(self) -> str | None:
        """Why the last clip in the optimizer's wrapper failed; None: it did not."""
        return self._failure

    @property
    def is_at_rest(self) -> bool:
        """Whether `before_step` and `release` have nothing to do."""
        return self._limit is None and self._failure is None and self.tensors is None and not self._covers

    @property
    def has_current(self) -> bool:
        """Whether anything was clipped since the last `take`: cheaper than `current`."""
        return bool(self._readings)

    @property
    def current(self) -> ClipReading | None:
        """What was clipped since the last `take`, with calls for several sets of parameters combined."""
        if not self._readings:
            return None
        if len(self._readings) == 1:
            return self._readings[0]
        norms = torch.stack([reading.norm.to(self._readings[0].norm.device) for reading in self._readings])
        limits = [reading.limit for reading in self._readings if reading.limit is not None]
        return ClipReading(
            norm=torch.linalg.vector_norm(norms),
            limit=min(limits, default=None),
            by_user=any(reading.by_user for reading in self._readings),
        )

    def take(self) -> ClipReading | None:
        """Return `current` and begin a new step. The core calls it once at each boundary."""
        if len(self._readings) == 1:  # as nearly always
            reading: ClipReading | None = self._readings.pop()
        else:
            reading = self.current
            self._readings = []
        if self._covers:
            self.release()
        return reading

    def take_covers(self) -> list[Cover]:
        """Return which gradients were clipped since the last update, and forget them."""
        covers, self._covers = self._covers, []
        return covers

    def release(self) -> None:
        """Stop holding gradients: the update is about to be made, or the step is over."""
        self._covers = []

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` with the lower of the two limits. Returns the norm before clipping (0-d)."""
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        elif type(parameters) is not list:  # a copy would touch every parameter
            parameters = list(parameters)
        self._user_limit = float(max_norm)
        limit = self._user_limit if self._limit is None else min(self._user_limit, self._limit)
        norm = self.clip(parameters, limit, norm_type, error_if_nonfinite, foreach)
        self._note(norm, limit, by_user=True)
        if self.keeps_covers or self._limit is not None:
            self._cover(norm, norm_type, parameters)
        return norm

    def clip(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip with exactly this limit and record nothing: what the loop's call does after `detach`."""
        if self._stages is None:
            return torch_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return self._stages.clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach, _whole_norm)

    def before_step(self) -> None:
        """Called in the optimizer wrapper, before the skip guard: if our limit is set, clip what the loop did not."""
        self._failure = None
        try:
            if self._limit is not None and self.share_norm is not None:
                self._hold_limit_of_all(self._limit, self.share_norm)
            elif self._limit is not None:
                self._hold_limit(self._limit)
            if self.tensors is not None:
                parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
                self.tensors.clip(parameters, getattr(self._optimizer, "grad_scale", None))
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _hold_limit(self, limit: float) -> None:
        gradients = gradients_of(self._optimizer)
        if not gradients:
            return
        cover = next((one for one in self._covers if all(map(one.holds, gradients))), None)
        # The norm of sharded gradients is a collective call: all ranks make it, whatever each has done to its shards.
        if cover is not None and not any(map(is_sharded, gradients)):
            self._check(gradients, cover.norm_type)
            return
        self._clip_all(gradients, limit, self._unscaled(total_norm(gradients)), is_again=cover is not None)

    def _hold_limit_of_all(self, limit: float, share: SharedNorm) -> None:
        """For a pipeline: at every update, whatever the loop has clipped, as no stage knows what the others' loops did.

        Gradients that were already clipped by the norm of all stages do not change.
        """
        own, gradients = 0.0, list[torch.Tensor]()
        try:
            gradients = gradients_of(self._optimizer)
            own = float(whole(self._unscaled(total_norm(gradients)))) if gradients else 0.0
        except Exception as error:  # not raised: this rank would stop taking part while the others wait for it
            self._failure, gradients = f"{type(error).__name__}: {error}", []
        norms = share(own)
        if not gradients:
            return
        shared = torch.tensor([own] if norms is None else norms, dtype=torch.float32)
        norm = combine_norms(shared, 2.0).to(gradients[0].device)
        if bool(torch.isfinite(norm)):
            self._clip_all(gradients, limit, norm)
        else:  # clipping would make the finite gradients 0 or NaN too; the guard skips the update
            self._note(norm, limit, by_user=False)
            self._cover(norm, 2.0, [p for group in self._optimizer.param_groups for p in group["params"]])

    def _clip_all(
        self, gradients: list[torch.Tensor], limit: float, norm: torch.Tensor, *, is_again: bool = False
    ) -> None:
        """`is_again`: they were clipped to it already; what is reported is the norm before that."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        for mesh in {getattr(gradient, "device_mesh", None) for gradient in gradients}:
            clip_grads_with_norm_([p for p in parameters if getattr(p.grad, "device_mesh", None) == mesh], limit, norm)
        if not is_again:
            self._note(norm, limit, by_user=False)
        self._cover(norm, 2.0, parameters)
        self._check(gradients, 2.0)

    def after_closure(self) -> None:
        """Called in the optimizer wrapper after an update with a closure. Nothing could be clipped before that, but
        what the optimizer got is measured all the same."""
        if self._limit is not None and self._calls and (gradients := gradients_of(self._optimizer)):
            self._check(gradients, 2.0)

    def _unscaled(self, norm: torch.Tensor) -> torch.Tensor:
        # With a fused optimizer a GradScaler leaves the gradients scaled and passes the scale to the kernel.
        grad_scale = getattr(self._optimizer, "grad_scale", None)
        return norm if grad_scale is None else norm / grad_scale.to(norm.device)

    def _check(self, gradients: list[torch.Tensor], norm_type: float) -> None:
        if self._verify:
            self._norm_after = self._unscaled(whole(total_norm(gradients, norm_type)))
            self._verify = False

    def recent_norms(self) -> list[float]:
        """The latest norms (at most 8), oldest first. Reads tensors: for an action, not for every step."""
        return [float(norm) for norm in self._recent_norms]

    def clipped_ratio(self) -> float | None:
        """Share of the last `CLIP_WINDOW` clips under our limit that shortened the gradient; None before the first.

        Reads tensors: for a read-back, not for every step.
        """
        if not self._clipped:
            return None
        return float(torch.stack(list(self._clipped)).to(torch.float32).mean())

    def _note(self, norm: torch.Tensor, limit: float, *, by_user: bool) -> None:
        norm = norm if type(norm) is torch.Tensor else whole(norm)
        self._last = ClipReading(norm=norm, limit=limit, by_user=by_user)
        self._calls += 1
        if not by_user and self._readings:
            # The loop has clipped in this step: report the loop's norm, which is comparable with earlier ones.
            if self._clipped:
                self._clipped[-1] = self._clipped[-1] | (norm > limit).to(self._clipped[-1].device)
            return
        self._readings.append(self._last)
        self._recent_norms.append(norm)
        if self._limit is not None:
            self._clipped.append(norm > limit)

    def _cover(self, norm: torch.Tensor, norm_type: float, parameters: list[torch.Tensor]) -> None:
        found = [p.grad for p in parameters if p.grad is not None]
        held = {id(gradient): (gradient, version(gradient)) for gradient in found}
        self._covers.append(Cover(norm=whole(norm), norm_type=float(norm_type), gradients=held))
