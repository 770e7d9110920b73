"""Hooks that run a Transformer Engine module in BF16 for a while ("away"), and measure its amaxes meanwhile.

The module's scales do not change while it is away. So at each forward the largest magnitude of what its casts would
read is taken, by slot of the scale (TE 2.20 `pytorch/module/base.py` 1139): inputs (after the norm, if the module has
one of its own), weights and the gradient of its output. What stays inside the module (a LayerNormMLP's activation and
the gradient before it) cannot be measured from outside and keeps its scale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F

from fp8watch.capture.copied_hooks import StaysHere
from fp8watch.capture.update_size import local_part

logger = logging.getLogger(__name__)

Slot = tuple[bool, int]
"""Whether it belongs to the forward, and its index in that direction's scale vector."""


class Away:
    """Never raises into a forward: what cannot be measured is left out, with one warning."""

    def __init__(self, module: torch.nn.Module, te: Any, has_run: Callable[[], None]) -> None:
        """`has_run` is called after each forward."""
        self._te, self._has_run = te, has_run
        self._contexts: list[ExitStack] = []
        self._is_failed = False
        self.amax: dict[Slot, torch.Tensor] = {}
        """0-D float32 on the device, from the last forward and backward."""
        self._handles = [
            module.register_forward_pre_hook(StaysHere(self.enter), with_kwargs=True),
            module.register_forward_hook(StaysHere(self.leave), always_call=True),
        ]

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Forward pre-hook: enter BF16 and measure the forward casts."""
        stack = ExitStack()
        stack.enter_context(self._te.autocast(enabled=False))
        self._contexts.append(stack)
        source = next((a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)), None)
        self._measure(lambda: _forward_casts(module, source))

    def leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook, also called if the forward raised: leave BF16 and measure the gradient when it comes."""
        if self._contexts:
            self._contexts.pop().close()
        self._has_run()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            slots = _gradient_slots(module)
            first.register_hook(lambda grad: self._measure(lambda: ((slot, grad) for slot in slots)))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove the hooks: the module returns to FP8."""
        for handle in self._handles:
            handle.remove()

    def _measure(self, casts: Callable[[], Iterator[tuple[Slot, torch.Tensor]]]) -> None:
        if self._is_failed:
            return
        try:
            with torch.no_grad():
                for slot, values in casts():
                    if values.is_floating_point() and values.numel():  # an expert without tokens has no amax
                        # TE's kernels ignore NaN too.
                        self.amax[slot] = values.detach().abs().nan_to_num(nan=0.0).amax().float()
        except Exception:
            self._is_failed = True
            logger.warning("fp8watch: amax of a module in BF16 cannot be measured; it will return to its old scales",
                           exc_info=True)  # fmt: skip


class Once:
    """Reports a module's first forward after its return, then removes itself."""

    def __init__(self, module: torch.nn.Module, has_run: Callable[[], None]) -> None:
        self._has_run = has_run
        self._handle = module.register_forward_hook(StaysHere(self.ran))

    def ran(self, *_: Any) -> None:
        """Forward hook."""
        self._has_run()
        self._handle.remove()


def _forward_casts(module: Any, source: torch.Tensor | None) -> Iterator[tuple[Slot, torch.Tensor]]:
    """`(slot, tensor that would be cast)` for a forward, with the slots of a module of GEMMs."""
    kinds = _kinds(module)
    if "GroupedLinear" in kinds:
        for i in range(int(module.num_gemms)):
            if source is not None:
                yield (True, 3 * i), source  # the input of all experts: an upper bound for each
            yield (True, 3 * i + 1), local_part(getattr(module, f"weight{i}"))
        return
    if "LayerNormMLP" in kinds:
        weights = {1: [module.fc1_weight], 4: [module.fc2_weight]}
    else:
        names = getattr(module, "weight_names", None) or ["weight"]
        weights = {1: [w for w in (getattr(module, name, None) for name in names) if isinstance(w, torch.Tensor)]}
    if source is not None:
        yield (True, 0), _normalised(module, source) if hasattr(module, "layer_norm_weight") else source
    for slot, parts in weights.items():
        for part in parts:
            yield (True, slot), local_part(part)


def _gradient_slots(module: Any) -> list[Slot]:
    kinds = _kinds(module)
    if "GroupedLinear" in kinds:
        return [(False, 2 * i) for i in range(int(module.num_gemms))]
    return [(False, 2 if "LayerNormMLP" in kinds else 0)]


def _normalised(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The input after the module's own norm, in the input's dtype, which is exact enough for an amax."""
    gamma = local_part(module.layer_norm_weight).to(x.dtype)
    if module.zero_centered_gamma:
        gamma = gamma + 1.0
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, (x.shape[-1],), gamma, module.eps)
    return F.layer_norm(x, (x.shape[-1],), gamma, local_part(module.layer_norm_bias).to(x.dtype), module.eps)


def _kinds(module: Any) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}
