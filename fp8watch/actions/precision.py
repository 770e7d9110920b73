"""What the FP8 actions share: modules held in BF16 by several actions at once, tensor names, memory."""

from __future__ import annotations

import itertools
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.capture.controls import Fp8Controls
from fp8watch.errors import ActionError

TENSORS = ("input", "weight", "grad_output")
"""The tensors of a linear module that have a scale."""
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
        # A framework that keeps no scales says which actions it leaves nothing to do for, and why.
        reasons: dict[str, str] = getattr(controls, "unavailable", {})
        return reasons.get(self.name)

    def _modules(self) -> list[str]:
        """The FP8 modules of this rank."""
        controls = self._context.controls
        return [] if controls is None else list(controls.modules())

    def _is_elsewhere(self) -> bool:
        """Whether all FP8 modules are on other ranks: then there is nothing to do here, and that is no failure."""
        return bool(self._context.elsewhere) and not self._modules()

    def _nothing_here(self, step: int, params: dict[str, Any]) -> Applied:
        return Applied(step=step, params=params, before={}, expected={"elsewhere": True})

    def _controls(self) -> Fp8Controls:
        if reason := self.unavailable():
            raise ActionError(reason)
        assert self._context.controls is not None
        return self._context.controls

    def _has_updated(self, applied: Applied) -> bool:
        """Whether a whole optimizer step lies between the action and now (replays count on, unlike step numbers)."""
        return bool(self._context.lr.updates > applied.expected["after_update"])


class HighPrecision(Fp8Action):
    """Base of `bf16_layers` and `bf16_all`: modules held in BF16 until nothing holds them any more."""

    def _hold(self, step: int, params: dict[str, Any], modules: list[str]) -> Applied:
        if not modules and self._context.elsewhere:
            return self._nothing_here(step, params)
        controls = self._controls()
        held = {module for modules in self._context.high_precision.values() for module in modules}
        controls.set_high_precision(modules, high_precision=True)
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
                "extra_memory_bytes": self.extra_memory_bytes(modules),
            },
        )

    def extra_memory_bytes(self, modules: list[str]) -> int:
        """Lower bound of what BF16 costs more: a weight of 2 bytes an element where FP8 casts to 1.

        Saved activations grow likewise by 1 byte an element; their shapes are not known here.
        """
        weights = (self._context.model.get_submodule(name)._parameters.get("weight") for name in modules)
        return sum(weight.numel() for weight in weights if weight is not None)

    def read_back(self, applied: Applied) -> ReadBack:
        """What the modules did in their last forward, once a step has passed."""
        if "elsewhere" in applied.expected:
            return NOTHING_HERE
        if applied.expected["hold"] not in self._context.high_precision:
            return ReadBack(ok=False, detail="given back already")
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
        """Give `params["layers"]` back to FP8 (by default all of the action's), unless another action holds them."""
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
            self._controls().set_high_precision(back, high_precision=False)
        if rest:
            self._context.high_precision[key] = rest
        else:
            del self._context.high_precision[key]


def scale_names(controls: Fp8Controls) -> list[str]:
    """`module:tensor` of every scale that can be read; tensors a framework does not keep are left out."""
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
