"""FP8 on the GPU: every linear layer of the blocks is a `te.Linear`, with delayed scaling under `te.autocast`.

Parameters and activations stay float32, as in the emulation: only the inputs of the GEMMs are FP8. The region has one
recipe object for the whole training: TE's update reads that object, so a change to it takes effect.

Sources: TE 2.20 `pytorch/module/base.py` 1139 (three slots forward: input, weight, output; two backward: grad_output,
grad_input; output and grad_input are cast only with FP8 outputs, which are not used here), `pytorch/quantization.py`
656 (the update of all scales, once per direction), 1445 (casts read a view of the state's `scale`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fp8watch.demo.config import EngineName
from fp8watch.demo.engines.base import Region

FORWARD_SLOTS, BACKWARD_SLOTS = 2, 1
UPDATE = "reduce_and_update_fp8_tensors"


class _StuckUpdate:
    """Replaces the library's update of all scales: the update runs, and some scales are then set back to what they
    were.

    It lasts for the life of the process, like the fault that it imitates. It also runs on autograd's thread, and waits
    for nothing.
    """

    def __init__(self, manager: Any) -> None:
        self._update: Callable[..., None] = getattr(manager, UPDATE)
        self._scales: tuple[torch.Tensor, ...] = ()
        setattr(manager, UPDATE, self)

    def add(self, scale: torch.Tensor) -> None:
        """Set back one more scale after each update."""
        self._scales = (*self._scales, scale)

    @torch.no_grad()
    def __call__(self, forward: bool = True) -> None:
        """TE calls it by this name and argument."""
        before = [scale.clone() for scale in self._scales]
        self._update(forward=forward)
        for scale, value in zip(self._scales, before, strict=True):
            scale.copy_(value)


class _Scales:
    """The slots of a state that are cast; views, so that values written to them reach the casts."""

    def __init__(self, state: Any, num_slots: int, manager: Any) -> None:
        self._manager = manager
        self.scale: torch.Tensor = state.scale[:num_slots]
        self.amax_history: torch.Tensor = state.amax_history[:, :num_slots]

    def stick(self) -> None:
        """Through the update, so that the tensors stay where casts and observers read them."""
        update = getattr(self._manager, UPDATE)
        if not isinstance(update, _StuckUpdate):
            update = _StuckUpdate(self._manager)
        update.add(self.scale)


class TransformerEngine:
    """`library` and `manager` stand in for TE's own in tests. Raises `ImportError` where TE is missing."""

    name: EngineName = "transformer_engine"

    def __init__(self, library: Any | None = None, recipes: Any | None = None, manager: Any | None = None) -> None:
        self._te = library or importlib.import_module("transformer_engine.pytorch")
        self._recipes = recipes or importlib.import_module("transformer_engine.common.recipe")
        self._manager = manager or _manager()

    def convert(self, model: nn.Module, *, amax_history_len: int) -> Region:
        """See `Engine`. Raises `ValueError` for widths that are not multiples of 16, which FP8 GEMMs require."""
        chosen = [
            name for name, module in model.named_modules() if type(module) is nn.Linear and name.startswith("blocks.")
        ]
        for name in chosen:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, self._converted(name, model.get_submodule(name)))
        recipe = self._recipes.DelayedScaling(
            margin=0,
            fp8_format=self._recipes.Format.HYBRID,
            amax_history_len=amax_history_len,
            amax_compute_algo="max",
        )
        return lambda: self._te.autocast(enabled=True, recipe=recipe)

    def _converted(self, name: str, linear: nn.Module) -> nn.Module:
        assert isinstance(linear, nn.Linear)
        sizes: Sequence[int] = (linear.in_features, linear.out_features)
        if any(size % 16 for size in sizes):
            raise ValueError(f"{name}: {sizes[1]} x {sizes[0]} are no multiples of 16")
        weight = linear.weight
        made: nn.Module = self._te.Linear(
            *sizes, bias=linear.bias is not None, params_dtype=weight.dtype, device=weight.device
        )  # fmt: skip
        with torch.no_grad():
            for key, value in linear.named_parameters():
                made.get_parameter(key).copy_(value)
        return made

    def scales(self, model: nn.Module, layer: str | None) -> Iterator[tuple[_Scales, _Scales]]:
        """See `Engine`."""
        for name, module in model.named_modules():
            meta = getattr(module, "fp8_meta", None)
            if not isinstance(meta, dict) or layer not in (None, name):
                continue
            if "scaling_fwd" in meta and "scaling_bwd" in meta:
                yield (
                    _Scales(meta["scaling_fwd"], FORWARD_SLOTS, self._manager),
                    _Scales(meta["scaling_bwd"], BACKWARD_SLOTS, self._manager),
                )


def _manager() -> Any:
    return importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
