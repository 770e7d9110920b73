"""Parameters before the first optimizer step: which hold NaN or infinity, and which hold only zeros.

Weights that were loaded wrongly are bad before training begins, and what follows (a NaN loss in the first step) looks
like a fault of training. The largest magnitude of each parameter shows it: NaN or infinite if any element is, 0 if all
are. It is taken once per process, when the first optimizer step begins (so it covers what was loaded after attach),
with one multi-tensor kernel per dtype and device, and copied out without waiting. The number of bad parameters is a
scalar of that step; their names follow when the copy has arrived.

A frozen parameter may hold infinities (masks do), but not NaN. A matrix of zeros is legal (adapters and output layers
start so), so it is only reported. Each rank checks its own part of a sharded parameter; a part of zeros says nothing.
Weights that exist in FP8 only are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fp8watch.capture.host_flags import HostFlags

MOST_NAMES = 16
"""Most names that are sent: if more are bad, everything is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Names of parameters, in model order within each device and dtype."""

    nonfinite: list[str]
    zero: list[str]
    """Matrices of which every element is 0."""


class FlightCheck:
    """Checks once. Call `start` and `take` on the training thread. Neither waits; they raise only if the model does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: torch.nn.Module | None = model
        self._facts: list[_Facts] = []
        self._flags = HostFlags()

    @property
    def is_due(self) -> bool:
        """Whether `start` has not been called yet."""
        return self._model is not None

    @torch.no_grad()
    def start(self) -> torch.Tensor | None:
        """Start the check. Returns how many are bad, 0-D float32 on the first one's device; None: nothing to check."""
        model, self._model = self._model, None
        if model is None:
            return None
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        facts: dict[tuple[torch.device, torch.dtype], list[_Facts]] = {}
        for values, fact in _lookable(model):
            key = (values.device, values.dtype)
            groups.setdefault(key, []).append(values)
            facts.setdefault(key, []).append(fact)
        if not groups:
            return None
        device = next(iter(groups))[0]
        largest = torch.cat(
            [
                torch.stack(torch._foreach_norm(tensors, float("inf"))).float().to(device, non_blocking=True)
                for tensors in groups.values()
            ]
        )
        self._facts = [fact for group in facts.values() for fact in group]
        is_frozen = torch.tensor(
            [fact.is_frozen for fact in self._facts], device="cpu", pin_memory=device.type == "cuda"
        )
        is_bad = ~torch.isfinite(largest) & ~(torch.isinf(largest) & is_frozen.to(device, non_blocking=True))
        self._flags.offer(torch.stack([is_bad, largest == 0]))
        return is_bad.sum().float()

    def take(self) -> Checked | None:
        """The result, once, after it has arrived; None before and after that."""
        rows = self._flags.take()
        if rows is None:
            return None
        checked = Checked(
            nonfinite=[fact.name for fact, is_bad in zip(self._facts, rows[0], strict=True) if is_bad],
            zero=[
                fact.name for fact, is_zero in zip(self._facts, rows[1], strict=True) if is_zero and fact.may_be_zero
            ],
        )
        self._facts = []
        return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    name: str
    may_be_zero: bool
    """Whether all zeros are worth reporting."""
    is_frozen: bool


def _lookable(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, _Facts]]:
    """This rank's part of each parameter that can be checked."""
    for name, parameter in model.named_parameters():
        local = getattr(parameter, "_local_tensor", None)
        values = local if isinstance(local, torch.Tensor) else parameter.detach()
        if hasattr(parameter, "_quantizer") or values.dtype not in _PLAIN or values.device.type == "meta":
            continue
        if values.numel() and values.layout is torch.strided:
            may_be_zero = local is None and values.dim() >= 2
            yield values, _Facts(name=name, may_be_zero=may_be_zero, is_frozen=not parameter.requires_grad)


_PLAIN = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
