"""Changing precision and scales of Transformer Engine modules in a live run (delayed scaling).

Precision: a forward pre-hook enters `te.autocast(enabled=False)` around the module and a forward hook
(`always_call=True`) leaves it: decided at each forward, backward follows what forward saved (TE 2.20
`module/base.py` 1528). While a module is away its scale and history stand still, so the amax of its input and
weight is measured in the pre-hook and that of its output's gradient by a tensor hook, all on the device; the
return starts from scales made from them instead of from stale ones.

Margin: only a change of the live recipe object that the update reads has an effect; a new recipe object passed
to autocast is silently ignored (run on TE 2.20.2), which is why `margin` reads what the update will use.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from fp8watch.capture.copied_hooks import StaysHere
from fp8watch.capture.te.states import delayed_states, element_names, recipe_of
from fp8watch.errors import ActionError
from fp8watch.formats import E4M3, E5M2

logger = logging.getLogger(__name__)

SLOTS = {"input": 0, "weight": 1, "grad_output": 0}


class _Away:
    """A module that runs in BF16: what its hooks do, and the amaxes measured meanwhile (0-d tensors on the device)."""

    def __init__(self, module: torch.nn.Module, te: Any, has_run: Callable[[], None]) -> None:
        """`has_run` is told after each forward."""
        self._te, self._has_run = te, has_run
        self._contexts: list[ExitStack] = []
        self.amax: dict[str, torch.Tensor] = {}
        self.handles = [
            module.register_forward_pre_hook(StaysHere(self.enter), with_kwargs=True),
            module.register_forward_hook(StaysHere(self.leave), always_call=True),
        ]

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """The module is about to run."""
        stack = ExitStack()
        stack.enter_context(self._te.autocast(enabled=False))
        self._contexts.append(stack)
        source = next((a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)), None)
        weight = getattr(module, "weight", None)
        with torch.no_grad():
            if source is not None and source.is_floating_point():
                _raise_to(self.amax, "input", source)
            if isinstance(weight, torch.Tensor):
                _raise_to(self.amax, "weight", weight)

    def leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """It has run, or raised."""
        if self._contexts:
            self._contexts.pop().close()
        self._has_run()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(lambda grad: _raise_to(self.amax, "grad_output", grad))  # type: ignore[no-untyped-call]


class _Once:
    """Tells that a module has run again after its return, and goes."""

    def __init__(self, module: torch.nn.Module, has_run: Callable[[], None]) -> None:
        self._has_run = has_run
        self._handle = module.register_forward_hook(StaysHere(self.ran))

    def ran(self, *_: Any) -> None:
        """The module has run."""
        self._has_run()
        self._handle.remove()


class TeControls:
    """See the module's docstring."""

    name = "transformer_engine"

    def __init__(self, model: torch.nn.Module, *, library: Any | None = None, quantization: Any | None = None) -> None:
        self._model = model
        self._te = library or importlib.import_module("transformer_engine.pytorch")
        self._quantization = quantization or importlib.import_module("transformer_engine.pytorch.quantization")
        self._away: dict[str, _Away] = {}
        self._pending: set[str] = set()
        """Modules that have not run since their switch."""

    def modules(self) -> Sequence[str]:
        """Modules with FP8 state, in the model's order."""
        return [name for name, module in self._model.named_modules() if self._is_fp8_module(module)]

    def set_high_precision(self, modules: Sequence[str], *, high_precision: bool) -> None:
        """Send modules away to BF16 or bring them back. Raises `ActionError` for what cannot switch live."""
        found = {name: self._module(name) for name in modules}
        blocked = [name for name, module in found.items() if getattr(module, "primary_weights_in_fp8", False)]
        if high_precision and blocked:
            raise ActionError(f"weights exist in FP8 only, BF16 at the next restart: {', '.join(blocked)}")
        for name, module in found.items():
            if high_precision and name not in self._away:
                self._away[name] = _Away(module, self._te, partial(self._pending.discard, name))
            elif not high_precision and name in self._away:
                self._bring_back(name, module, self._away.pop(name))
            self._pending.add(name)
            # A weight cast before the switch must not be used after it (stale when re-enabled mid-accumulation).
            getattr(module, "_fp8_workspaces", {}).clear()

    def ran_high_precision(self, modules: Sequence[str]) -> list[bool | None]:
        """`module.fp8` is what TE's last forward decided; None before the first forward after a switch."""
        return [None if name in self._pending else not bool(self._module(name).fp8) for name in modules]

    def repair_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Purge inf and NaN from the windows and set each scale from the clean maximum, in place."""
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
        """Scales in force (one device read each: only for read-backs)."""
        return {tensor: float(state.scale[slot]) for tensor in tensors for state, slot, _ in [self._slot(tensor)]}

    def margin(self) -> float | None:
        """What the next update will use; None without a delayed recipe."""
        margins = [float(recipe.margin) for recipe in self._live_recipes()]
        return margins[0] if margins else None

    def set_margin(self, margin: float) -> None:
        """Mutate every recipe object the update reads. Raises `ActionError` where there is none."""
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

    def _bring_back(self, name: str, module: Any, away: _Away) -> None:
        for handle in away.handles:
            handle.remove()
        _Once(module, partial(self._pending.discard, name))
        margin = self.margin() or 0.0
        for tensor, amax in away.amax.items():
            key, fp8_max = ("scaling_bwd", E5M2.max) if tensor == "grad_output" else ("scaling_fwd", E4M3.max)
            state = module.fp8_meta.get(key)
            scale = getattr(state, "scale", None)  # current and block scaling keep none
            if scale is None or scale.numel() > 3:
                continue
            slot = SLOTS[tensor]
            fresh = fp8_max / amax.to(state.scale.device, torch.float32) / 2.0**margin
            usable = torch.isfinite(fresh) & (amax > 0)
            state.scale[slot] = torch.where(usable, fresh, state.scale[slot])
            state.amax_history[-1, slot] = torch.where(usable, amax.float(), state.amax_history[-1, slot])

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
            raise ActionError(f"{name} is no FP8 module")
        return module

    def _slot(self, tensor: str) -> tuple[Any, int, float]:
        """`(state, element, fp8_max)` of `module:tensor`."""
        for name, module, key, forward, state in delayed_states(self._model):
            for slot, meaning in enumerate(element_names(module, name, key, state, forward=forward)):
                if meaning is not None and f"{meaning[0]}:{meaning[1]}" == tensor:
                    recipe = recipe_of(module, forward=forward)
                    hybrid = "HYBRID" in str(getattr(recipe, "fp8_format", "HYBRID"))
                    return state, slot, E4M3.max if forward or not hybrid else E5M2.max
        raise ActionError(f"no delayed-scaling tensor {tensor}")

    def _live_recipes(self) -> Iterable[Any]:
        manager = self._quantization.FP8GlobalStateManager
        state = getattr(manager, "quantization_state", manager)
        keys = {key.split("_", 1)[1] for key in state.global_amax_buffer}
        return [arguments[0] for key, arguments in state.autocast_arguments.items() if key in keys]


def _raise_to(amaxes: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """Keep the last amax of `values` on the device (NaN ignored as TE's kernels do)."""
    amaxes[name] = values.detach().abs().nan_to_num(nan=0.0).amax().float()
