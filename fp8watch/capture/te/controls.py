"""Changes precision and scales of Transformer Engine modules during training (delayed scaling).

Precision: a forward pre-hook enters `te.autocast(enabled=False)` around the module and a forward hook
(`always_call=True`) leaves it. So precision is decided at each forward, and the backward follows what the forward saved
(TE 2.20 `module/base.py` 1528). While a module is in BF16 ("away"), its scale and history do not change. Its amaxes are
measured meanwhile (`away`), and it returns with scales made from them instead of stale ones.

Margin: it must be changed in the live recipe object that the update reads; a new recipe object passed to autocast is
silently ignored (run on TE 2.20.2). That is why `margin` reads what the update will use.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from fp8watch.capture.te.away import Away, Once
from fp8watch.capture.te.states import delayed_states, element_names, is_mixed, recipe_of
from fp8watch.capture.te.tensors import format_name
from fp8watch.errors import ActionError
from fp8watch.formats import E4M3, E5M2, FORMATS


class TeControls:
    """See the module's docstring."""

    name = "transformer_engine"

    def __init__(self, model: torch.nn.Module, *, library: Any | None = None, quantization: Any | None = None) -> None:
        self._model = model
        self._te = library or importlib.import_module("transformer_engine.pytorch")
        self._quantization = quantization or importlib.import_module("transformer_engine.pytorch.quantization")
        self._away: dict[str, Away] = {}
        self._pending: set[str] = set()
        """Modules that have not run since they were switched."""

    def modules(self) -> Sequence[str]:
        """Modules with FP8 state, in model order."""
        return [name for name, module in self._model.named_modules() if self._is_fp8_module(module)]

    def set_high_precision(self, modules: Sequence[str], *, high_precision: bool) -> None:
        """Switch modules to BF16 or back to FP8. Raises `ActionError` for those that cannot switch during training."""
        found = {name: self._module(name) for name in modules}
        blocked = [name for name, module in found.items() if getattr(module, "primary_weights_in_fp8", False)]
        if high_precision and blocked:
            raise ActionError(f"weights exist in FP8 only, BF16 at the next restart: {', '.join(blocked)}")
        for name, module in found.items():
            if high_precision and name not in self._away:
                self._away[name] = Away(module, self._te, partial(self._pending.discard, name))
            elif not high_precision and name in self._away:
                self._bring_back(name, module, self._away[name])
                del self._away[name]
            else:
                continue
            self._pending.add(name)
            # A weight cast before the switch must not be used after it (it is stale on a return during accumulation).
            getattr(module, "_fp8_workspaces", {}).clear()

    def ran_high_precision(self, modules: Sequence[str]) -> list[bool | None]:
        """From `module.fp8`, which TE sets in each forward; None before the first forward after a switch."""
        return [None if name in self._pending else not bool(self._module(name).fp8) for name in modules]

    def repair_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Purge infinities and NaN from the windows and set each scale from the clean maximum, in place."""
        repaired = {}
        for tensor in tensors:
            state, slot, fp8_max = self._slot(tensor)
            state.amax_history.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            amax = float(state.amax_history[:, slot].max())
            if amax > 0:
                state.scale[slot] = fp8_max / amax / 2.0 ** (self.margin() or 0.0)
                repaired[tensor] = float(state.scale[slot])
        return repaired

    def scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Current scales. One device read each: for read-backs only."""
        return {tensor: float(state.scale[slot]) for tensor in tensors for state, slot, _ in [self._slot(tensor)]}

    def highest_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """See `fp8watch.capture.controls.Fp8Controls`. Unknown with a history of length 1, which TE zeroes."""
        found = {}
        for tensor in tensors:
            state, slot, fp8_max = self._slot(tensor)
            amax = float(state.amax_history[-1, slot])
            if math.isfinite(amax) and amax > 0:
                found[tensor] = fp8_max / amax
        return found

    def margin(self) -> float | None:
        """The margin that the next update will use; None without a delayed-scaling recipe."""
        margins = [float(recipe.margin) for recipe in self._live_recipes()]
        return margins[0] if margins else None

    def set_margin(self, margin: float) -> None:
        """Set it in every recipe object that the update reads. Raises `ActionError` if there is none."""
        recipes = list(self._live_recipes())
        if not recipes:
            raise ActionError("no delayed-scaling recipe is in use")
        for recipe in recipes:
            recipe.margin = margin

    def state_dict(self) -> dict[str, object]:
        """Scales and windows of every module, cloned; TE's own extra state is empty for modules in BF16."""
        return {
            f"{name}/{key}": {"scale": state.scale.clone(), "amax_history": state.amax_history.clone()}
            for name, _, key, _, state in delayed_states(self._model)
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Copy into the live tensors (they are registered in TE's global buffers) and drop cached FP8 weights."""
        for name, module, key, _, live in delayed_states(self._model):
            saved: Any = state.get(f"{name}/{key}")
            if saved is not None and saved["amax_history"].shape == live.amax_history.shape:
                live.scale.copy_(saved["scale"])
                live.amax_history.copy_(saved["amax_history"])
            getattr(module, "_fp8_workspaces", {}).clear()

    def _bring_back(self, name: str, module: Any, away: Away) -> None:
        margin = self.margin() or 0.0
        for (forward, slot), amax in away.amax.items():
            key = "scaling_fwd" if forward else "scaling_bwd"
            state = module.fp8_meta.get(key)
            scale = getattr(state, "scale", None)  # current and block scaling keep none
            # Attention has other slots than GEMMs, and a module that mixes recipes has fewer slots than tensors.
            if scale is None or slot >= scale.numel() or is_mixed(module):
                continue
            amax = amax.to(scale.device)
            fresh = _fp8_max(module, state, forward=forward) / amax / 2.0**margin
            usable = torch.isfinite(fresh) & (amax > 0)
            scale[slot] = torch.where(usable, fresh, scale[slot])
            state.amax_history[-1, slot] = torch.where(usable, amax, state.amax_history[-1, slot])
        away.remove()  # last: a module whose scales could not be made is away still
        Once(module, partial(self._pending.discard, name))

    # --- finding things ---------------------------------------------------------------------------

    @staticmethod
    def _is_fp8_module(module: torch.nn.Module) -> bool:
        return isinstance(getattr(module, "fp8_meta", None), dict) and hasattr(module, "fp8")

    def _module(self, name: str) -> Any:
        try:
            module = self._model.get_submodule(name)
        except AttributeError as error:
            raise ActionError(f"no module {name}") from error
        if not self._is_fp8_module(module):
            raise ActionError(f"{name} is not an FP8 module")
        return module

    def _slot(self, tensor: str) -> tuple[Any, int, float]:
        """`(state, element, fp8_max)` of `module:tensor`."""
        for name, module, key, forward, state in delayed_states(self._model):
            for slot, meaning in enumerate(element_names(module, name, key, state, forward=forward)):
                if meaning is not None and f"{meaning[0]}:{meaning[1]}" == tensor:
                    return state, slot, _fp8_max(module, state, forward=forward)
        raise ActionError(f"no delayed-scaling tensor {tensor}")

    def _live_recipes(self) -> Iterable[Any]:
        manager = self._quantization.FP8GlobalStateManager
        state = getattr(manager, "quantization_state", manager)
        keys = {key.split("_", 1)[1] for key in state.global_amax_buffer}
        return [arguments[0] for key, arguments in state.autocast_arguments.items() if key in keys]


def _fp8_max(module: Any, state: Any, *, forward: bool) -> float:
    """Largest value of the format that a direction's tensors are cast to."""
    dtype = getattr(getattr(state, "_ds_state", None) or state, "dtype", None)
    if dtype is not None:
        return FORMATS[format_name(dtype)].max
    is_hybrid = "HYBRID" in str(getattr(recipe_of(module, forward=forward), "fp8_format", "HYBRID"))
    return E4M3.max if forward or not is_hybrid else E5M2.max
