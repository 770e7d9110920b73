"""Common parts of the FP8 actions: modules held in BF16 by several actions at once, tensor names, memory cost."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.undo import Undo, whole
from fp8watch.capture.controls import Fp8Controls
from fp8watch.errors import ActionError

TENSORS = ("input", "weight", "grad_output")
"""The tensors of a linear module that can have a scale."""
NOTHING_HERE = ReadBack(ok=True, observed={"modules": 0}, detail="the modules are on other ranks")
_keys = itertools.count(1)


class Fp8Action:
    """Base of the actions on FP8 modules."""

    name = ""

    def __init__(self, context: ActionContext) -> None:
        self._context = context

    def unavailable(self) -> str | None:
        """See `Action`."""
        controls = self._context.controls
        if self._is_elsewhere():
            return None
        if controls is None or not controls.modules():
            return "no FP8 module was found in the model"
        # Controls of a framework without persistent scales list the actions that cannot work, with the reasons.
        reasons: dict[str, str] = getattr(controls, "unavailable", {})
        return reasons.get(self.name)

    def _modules(self) -> list[str]:
        """The FP8 modules of this rank."""
        controls = self._context.controls
        return [] if controls is None else list(controls.modules())

    def _is_elsewhere(self) -> bool:
        """Whether all FP8 modules are on other ranks. An action then does nothing here and succeeds."""
        return bool(self._context.elsewhere) and not self._modules()

    def _nothing_here(self, step: int, params: dict[str, Any]) -> Applied:
        return Applied(step=step, params=params, before={}, expected={"elsewhere": True})

    def _controls(self) -> Fp8Controls:
        if reason := self.unavailable():
            raise ActionError(reason)
        assert self._context.controls is not None
        return self._context.controls

    @staticmethod
    def _keep_scales(controls: Fp8Controls, undo: Undo) -> None:
        """Have the scales and histories of all modules be put back."""
        saved = controls.state_dict()
        undo.add("the FP8 scales", lambda: controls.load_state_dict(saved))

    def _has_updated(self, applied: Applied) -> bool:
        """Whether an optimizer update was made since the action. Counts updates, because step numbers go back at a
        rollback."""
        return bool(self._context.lr.updates > applied.expected["after_update"])


class HighPrecision(Fp8Action):
    """Base of `bf16_layers` and `bf16_all`. A module stays in BF16 as long as any action holds it."""

    def _hold(self, step: int, params: dict[str, Any], modules: list[str], undo: Undo) -> Applied:
        if not modules and self._context.elsewhere:
            return self._nothing_here(step, params)
        controls = self._controls()
        held = {module for modules in self._context.high_precision.values() for module in modules}
        extra_memory_bytes, before = self.extra_memory_bytes(modules), dict(self._context.high_precision)
        self._keep_scales(controls, undo)
        self._switch(controls, [name for name in modules if name not in held], undo, high_precision=True)
        undo.add("which modules are held in BF16", lambda: self._remember(before))
        key = f"{self.name}:{next(_keys)}"
        self._context.high_precision[key] = modules
        return Applied(
            step=step,
            params={**params, "layers": modules},
            before={"already_in_bf16": sorted(held & set(modules))},
            expected={
                "hold": key,
                "layers": modules,
                "after_update": self._context.lr.updates,
                "extra_memory_bytes": extra_memory_bytes,
            },
        )

    @staticmethod
    def _switch(controls: Fp8Controls, modules: list[str], undo: Undo, *, high_precision: bool) -> None:
        """Switch modules that run in the other precision now: all of them, or `ActionError`."""
        format_name = "BF16" if high_precision else "FP8"
        for name in modules:
            back = functools.partial(controls.set_high_precision, [name], high_precision=not high_precision)
            undo.add(f"{name} in {format_name}", back)
        try:
            controls.set_high_precision(modules, high_precision=high_precision)
        except Exception as error:
            raise ActionError(f"not all of the modules can run in {format_name}, none does: {error}") from error

    def _remember(self, held: dict[str, list[str]]) -> None:
        self._context.high_precision.clear()
        self._context.high_precision.update(held)

    def extra_memory_bytes(self, modules: list[str]) -> int:
        """Lower bound of the extra memory of BF16: a weight takes 2 bytes per element instead of 1 in FP8.

        Saved activations also grow by 1 byte per element, but their shapes are not known here.
        """
        weights = (self._context.model.get_submodule(name)._parameters.get("weight") for name in modules)
        return sum(weight.numel() for weight in weights if weight is not None)

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the modules ran in BF16 in their last forward, once a step has passed."""
        if "elsewhere" in applied.expected:
            return NOTHING_HERE
        if applied.expected["hold"] not in self._context.high_precision:
            return ReadBack(ok=False, detail="already back in FP8")
        if not self._has_updated(applied):
            return ReadBack(ok=None, detail="no step has passed since")
        layers = self._context.high_precision[applied.expected["hold"]]
        ran = dict(zip(layers, self._controls().ran_high_precision(layers), strict=True))
        observed = {"high_precision": sum(value is True for value in ran.values()), "modules": len(ran)}
        in_fp8 = [name for name, value in ran.items() if value is False]
        not_run = [name for name, value in ran.items() if value is None]
        if in_fp8:
            return ReadBack(ok=False, observed=observed, detail=f"still ran in FP8: {', '.join(in_fp8[:5])}")
        if not_run:
            return ReadBack(ok=None, observed=observed, detail=f"has not run since: {', '.join(not_run[:5])}")
        return ReadBack(ok=True, observed=observed)

    def revert(self, applied: Applied) -> None:
        """Return `params["layers"]` (default: all layers of the action) to FP8, unless another action holds them."""
        if "elsewhere" in applied.expected:
            return
        key = applied.expected["hold"]
        held = self._context.high_precision.get(key)
        if held is None:
            return
        wanted = read.names(applied.params, "layers", held, self._context.elsewhere)
        rest = [name for name in held if name not in wanted]
        others = {name for k, names in self._context.high_precision.items() if k != key for name in names}
        back = [name for name in wanted if name not in others]
        if back:
            with whole(self.name) as undo:
                controls = self._controls()
                self._keep_scales(controls, undo)
                self._switch(controls, back, undo, high_precision=False)
        if rest:
            self._context.high_precision[key] = rest
        else:
            del self._context.high_precision[key]

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether the modules ran in FP8 in their last forward, except those that other actions hold in BF16."""
        if "elsewhere" in applied.expected:
            return NOTHING_HERE
        back = read.names(applied.params, "layers", applied.expected["layers"], self._context.elsewhere)
        held = {name for names in self._context.high_precision.values() for name in names}
        back = [name for name in back if name not in held]
        if not back:
            return ReadBack(ok=True, observed={"modules": 0, "held_by_others": len(held)})
        ran = dict(zip(back, self._controls().ran_high_precision(back), strict=True))
        observed = {"high_precision": sum(value is True for value in ran.values()), "modules": len(ran)}
        if not_run := [name for name, value in ran.items() if value is None]:
            return ReadBack(ok=None, observed=observed, detail=f"has not run since: {', '.join(not_run[:5])}")
        if in_bf16 := [name for name, value in ran.items() if value]:
            return ReadBack(ok=None, observed=observed, detail=f"still ran in BF16: {', '.join(in_bf16[:5])}")
        return ReadBack(ok=True, observed=observed)


def scale_names(controls: Fp8Controls) -> list[str]:
    """`module:tensor` of every scale that can be read. Not every framework keeps a scale for every tensor."""
    found: list[str] = []
    for module in controls.modules():
        for tensor in TENSORS:
            name = f"{module}:{tensor}"
            try:
                controls.scales([name])
            except (ActionError, KeyError, IndexError):
                continue
            found.append(name)
    return found
