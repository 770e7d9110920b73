"""What the demo uses of Transformer Engine, on a CPU: modules, region, recipe and the update of all scales.

After TE 2.20's `pytorch/module/base.py` and `pytorch/quantization.py`: state is made at a module's first forward, three
slots forward and two backward; the update of a region's end is the forward one, that of the backward pass is made by
the region's first module. Scales and windows are those of `fp8watch.emulation`, which agree with TE's to the bit.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp8watch.emulation import ScalingState
from fp8watch.formats import E4M3, E5M2, Fp8Format


@dataclass(kw_only=True)
class DelayedScaling:
    margin: float = 0
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


class FP8GlobalStateManager:
    recipe: DelayedScaling | None = None
    is_first = False
    states: dict[bool, list[ScalingState]] = {True: [], False: []}  # noqa: RUF012
    recipes_seen: list[DelayedScaling] = []  # noqa: RUF012

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        for state in cls.states[forward]:
            assert cls.recipes_seen
            state.update(cls.recipes_seen[-1], state.amax_history[0].clone())  # type: ignore[arg-type]


@contextmanager
def autocast(*, enabled: bool, recipe: DelayedScaling | None = None) -> Iterator[None]:
    manager = FP8GlobalStateManager
    before = manager.recipe
    manager.recipe, manager.is_first = (recipe if enabled else None), enabled
    if enabled and recipe is not None and recipe not in manager.recipes_seen:
        manager.recipes_seen.append(recipe)
    try:
        yield
    finally:
        manager.recipe = before
    if enabled and torch.is_grad_enabled():
        manager.reduce_and_update_fp8_tensors(forward=True)


def quantized(x: torch.Tensor, state: ScalingState, slot: int, fmt: Fp8Format) -> torch.Tensor:
    amax = torch.zeros_like(state.scale)
    amax[slot] = x.abs().nan_to_num(nan=0.0).max()
    state.record(amax)
    scaled = (x * state.scale[slot]).clamp(-fmt.max, fmt.max)
    dtype = torch.float8_e4m3fn if fmt is E4M3 else torch.float8_e5m2
    return scaled.to(dtype).float() / state.scale[slot]


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: ScalingState, slot: int) -> torch.Tensor:
        return quantized(x, state, slot, E4M3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None, None


class _CastGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, state: ScalingState) -> torch.Tensor:
        ctx.state = state
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return quantized(grads[0], ctx.state, 0, E5M2), None


class _EndOfBackward(torch.autograd.Function):
    """At the input of the region's first module: the last of its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grads[0]


class Linear(torch.nn.Module):
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        torch.nn.init.constant_(self.weight, torch.nan)
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        manager = FP8GlobalStateManager
        self.fp8 = manager.recipe is not None
        if manager.recipe is None:
            return F.linear(x, self.weight)
        self.fp8_meta |= {"num_gemms": 1, "recipe": manager.recipe}
        self.init_fp8_meta_tensors(manager.recipe)
        for key, forward in (("scaling_fwd", True), ("scaling_bwd", False)):
            if not any(state is self.fp8_meta[key] for state in manager.states[forward]):
                manager.states[forward].append(self.fp8_meta[key])
        if manager.is_first and x.requires_grad:
            x, manager.is_first = _EndOfBackward.apply(x), False
        forward_state, backward_state = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        y = F.linear(_Cast.apply(x, forward_state, 0), _Cast.apply(self.weight, forward_state, 1))
        return _CastGradient.apply(y, backward_state)

    def init_fp8_meta_tensors(self, recipe: DelayedScaling) -> None:
        """State that is there stays: an update has hold of it."""
        assert self.fp8_meta["num_gemms"] == 1
        for key, fmt, slots in (
            ("scaling_fwd", E4M3, ("input", "weight", "output")),
            ("scaling_bwd", E5M2, ("grad_output", "grad_input")),
        ):
            if key not in self.fp8_meta:
                self.fp8_meta[key] = ScalingState(slots, fmt, recipe.amax_history_len, self.weight.device)

    def get_extra_state(self) -> torch.Tensor:
        if "scaling_fwd" not in self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        held = {key: self.fp8_meta[key].scale for key in ("scaling_fwd", "scaling_bwd")}
        return torch.frombuffer(bytearray(pickle.dumps(held)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state.numel():
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state for Linear.")


def install(monkeypatch: pytest.MonkeyPatch, *, problem: str = "") -> type[FP8GlobalStateManager]:
    """Put it where the library would be imported from, as new; `problem`: why its GPU has no FP8. The manager."""
    pytorch = SimpleNamespace(
        Linear=Linear, autocast=autocast, is_fp8_available=lambda return_reason=False: (not problem, problem)
    )
    modules = {
        "transformer_engine": SimpleNamespace(__version__="2.20.2"),
        "transformer_engine.pytorch": pytorch,
        "transformer_engine.common": SimpleNamespace(),
        "transformer_engine.common.recipe": SimpleNamespace(
            DelayedScaling=DelayedScaling, Format=SimpleNamespace(HYBRID="HYBRID")
        ),
        "transformer_engine.pytorch.quantization": SimpleNamespace(FP8GlobalStateManager=FP8GlobalStateManager),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    update = FP8GlobalStateManager.__dict__["reduce_and_update_fp8_tensors"]
    new = {"reduce_and_update_fp8_tensors": update, "states": {True: [], False: []}, "recipes_seen": []}
    for name, value in new.items():
        monkeypatch.setattr(FP8GlobalStateManager, name, value)
    return FP8GlobalStateManager
