"""What can be changed in `fp8watch.emulation` layers during training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fp8watch.capture.emulated import TENSORS
from fp8watch.emulation.linear import Fp8Linear
from fp8watch.emulation.recipe import DelayedScaling
from fp8watch.emulation.scaling import ScalingState
from fp8watch.errors import ActionError, CheckpointError


class EmulatedControls:
    """Controls of the `Fp8Linear` layers that the model has at each call. Unknown names raise `ActionError`."""

    name = "emulation"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def modules(self) -> Sequence[str]:
        """Qualified names of the FP8 layers."""
        return list(self._layers())

    def set_high_precision(self, modules: Sequence[str], *, high_precision: bool) -> None:
        """Takes effect in the next forward. Back in FP8, the scales come from the amax measured meanwhile."""
        for layer in self._named(modules):
            layer.set_high_precision(high_precision)

    def ran_high_precision(self, modules: Sequence[str]) -> list[bool | None]:
        """What the last forward did, not what was asked for."""
        return [layer.ran_high_precision for layer in self._named(modules)]

    def repair_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Purge the amax windows and set the scales; returns them. The other scales are not updated."""
        for layer, state, index in self._located(tensors):
            state.purge(layer.recipe, index)
        return self.scales(tensors)

    def scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Scales that the next casts use, by `module:tensor`."""
        located = self._located(tensors)
        return {name: float(state.scale[i]) for name, (_, state, i) in zip(tensors, located, strict=True)}

    def highest_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """See `fp8watch.capture.controls.Fp8Controls`."""
        newest = {
            name: (state.fmt.max, float(state.newest_amax[i]))
            for name, (_, state, i) in zip(tensors, self._located(tensors), strict=True)
        }
        return {name: most / amax for name, (most, amax) in newest.items() if math.isfinite(amax) and amax > 0}

    def margin(self) -> float | None:
        """Margin of the live recipe; None without FP8 layers."""
        return next((recipe.margin for recipe in self._recipes()), None)

    def set_margin(self, margin: float) -> None:
        """Set the margin in every live recipe; scales follow at the next update. Raises `ActionError` if not finite."""
        if not math.isfinite(margin):
            raise ActionError(f"margin must be finite, not {margin}")
        for recipe in self._recipes():
            recipe.margin = margin

    def state_dict(self) -> dict[str, object]:
        """Scales and amax windows by module. Precision and margin are not included: they belong to whoever set them."""
        return {
            name: {"forward": layer.scaling_forward.state_dict(), "backward": layer.scaling_backward.state_dict()}
            for name, layer in self._layers().items()
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore in place. Raises `CheckpointError` and changes nothing if something is missing or does not fit."""
        loads: list[tuple[ScalingState, Any]] = []
        for name, layer in self._layers().items():
            saved: Any = state.get(name)
            for direction, target in (("forward", layer.scaling_forward), ("backward", layer.scaling_backward)):
                try:
                    target.check_state_dict(saved[direction])
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise CheckpointError(f"FP8 state of {name} ({direction}) does not fit: {error}") from error
                loads.append((target, saved[direction]))
        for target, values in loads:
            target.load_state_dict(values)

    def _layers(self) -> dict[str, Fp8Linear]:
        return {name: module for name, module in self._model.named_modules() if isinstance(module, Fp8Linear)}

    def _recipes(self) -> Iterator[DelayedScaling]:
        return iter({id(layer.recipe): layer.recipe for layer in self._layers().values()}.values())

    def _named(self, modules: Sequence[str]) -> list[Fp8Linear]:
        layers = self._layers()
        if unknown := [name for name in modules if name not in layers]:
            raise ActionError(f"no FP8 layer named {', '.join(unknown)}")
        return [layers[name] for name in modules]

    def _located(self, tensors: Sequence[str]) -> list[tuple[Fp8Linear, ScalingState, int]]:
        layers = self._layers()
        located = []
        for full_name in tensors:
            module, _, tensor = full_name.rpartition(":")
            if module not in layers or tensor not in TENSORS:
                raise ActionError(f"no FP8 tensor named {full_name}")
            layer = layers[module]
            state = layer.scaling_backward if tensor == "grad_output" else layer.scaling_forward
            located.append((layer, state, state.tensors.index(tensor)))
        return located
