"""Casts of a torchao layer according to its configuration: their formats, their number, and the scale for an amax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8watch.formats import FORMATS

SMALLEST_AMAX = 1e-12
"""torchao's `EPS`: a smaller amax is replaced by this (torchao 0.18 `float8/float8_utils.py`)."""

_NAME_OF_DTYPE = {getattr(torch, fmt.torch_dtype): name for name, fmt in FORMATS.items()}


def is_float8_linear(module: torch.nn.Module) -> bool:
    """Whether a module is torchao's float8 layer, from the name and module of its class, without an import."""
    return any(
        cls.__name__ == "Float8Linear" and cls.__module__.startswith("torchao.float8") for cls in type(module).__mro__
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRecipe:
    """The casts of one layer."""

    formats: dict[str, str]
    """Tensor -> key of `FORMATS`: the format of its first cast that is on, else the default."""
    is_cast: dict[str, bool]
    """Whether the tensor is cast for any GEMM."""
    gradient_casts: int
    """Casts of grad_output in one backward pass: one per GEMM that takes it in FP8."""
    rounds_to_power_of_2: bool


def cast_recipe(module: Any) -> CastRecipe:
    """Read the recipe from `module.config`; names as in torchao 0.18 `float8/config.py`."""
    config = module.config
    uses = {
        "input": (config.cast_config_input, config.cast_config_input_for_grad_weight),
        "weight": (config.cast_config_weight, config.cast_config_weight_for_grad_input),
        "grad_output": (config.cast_config_grad_output, config.cast_config_grad_output_for_grad_weight),
    }
    defaults = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
    on = {tensor: [use for use in pair if use.scaling_type.name != "DISABLED"] for tensor, pair in uses.items()}
    return CastRecipe(
        formats={
            tensor: _NAME_OF_DTYPE.get(pair[0].target_dtype, defaults[tensor]) if pair else defaults[tensor]
            for tensor, pair in on.items()
        },
        is_cast={tensor: bool(pair) for tensor, pair in on.items()},
        gradient_casts=len(on["grad_output"]),
        rounds_to_power_of_2=bool(config.round_scales_to_power_of_2),
    )


class ScaleRule:
    """The scale that torchao makes from an amax, for all columns at once: fp8_max / max(amax, 1e-12) in FP64."""

    def __init__(self, modules: Sequence[Any], tensors: Sequence[str], device: torch.device) -> None:
        recipes = [cast_recipe(module) for module in modules]
        table = torch.tensor(
            [
                (FORMATS[recipe.formats[tensor]].max, recipe.rounds_to_power_of_2, recipe.is_cast[tensor])
                for recipe in recipes
                for tensor in tensors
            ],
            dtype=torch.float64,
            device="cpu",
            pin_memory=device.type == "cuda",
        ).view(-1, 3)
        on_device = table.to(device, non_blocking=True)
        self._fp8_max = on_device[:, 0]
        self._rounds = on_device[:, 1] != 0
        self.is_cast = on_device[:, 2] != 0
        """bool [num_columns]."""

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """amax -> scale, both float32 [num_columns]."""
        scale = (self._fp8_max / amax.to(torch.float64).clamp(min=SMALLEST_AMAX)).to(torch.float32)
        return torch.where(self._rounds, torch.exp2(torch.floor(torch.log2(scale))), scale)
