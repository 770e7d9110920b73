"""Changes the precision of torchao float8 layers during training.

A layer in high precision gets its own `forward` (an instance attribute that hides the class's), which runs `nn.Linear`
in BF16 on the same parameters; the optimizer, the state dict and other layers notice nothing. The forwards themselves
note which precision really ran. A compiled graph does so with the notes that a source puts on the layer (`compiled`);
without notes its precision is unknown, and the switch is not taken as done. Dynamo guards on the attribute: the switch
costs one more graph per layer, the return none.

torchao computes each scale from the tensor itself and keeps none: there is nothing to repair and no margin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from fp8watch.capture.copied_hooks import StaysHere
from fp8watch.capture.torchao.compiled import forget_precision, noted_forward, noted_precision
from fp8watch.capture.torchao.scales import is_float8_linear
from fp8watch.capture.torchao.taps import taps
from fp8watch.errors import ActionError

STATELESS = "torchao computes every scale from the tensor itself and keeps none, so there is none to repair"
NO_MARGIN = "torchao's dynamic scales have no margin: they always map amax to the format's maximum"
_RAN = "_fp8watch_ran_high_precision"


class TorchaoControls:
    """Controls of the `Float8Linear` layers that the model has at each call. Unknown names raise `ActionError`."""

    name = "torchao.float8"
    unavailable: ClassVar[dict[str, str]] = {"repair_scale": STATELESS, "raise_margin": NO_MARGIN}
    """Action -> why it cannot work here."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._first_runs: dict[str, Any] = {}
        """Hooks, by layer, that wait for the first FP8 forward after a return."""

    def modules(self) -> Sequence[str]:
        """Qualified names of the float8 layers, whatever precision they run in at present."""
        return list(self._layers())

    def set_high_precision(self, modules: Sequence[str], *, high_precision: bool) -> None:
        """Takes effect in the next forward. Raises `ActionError` for a weight that is gathered in FP8."""
        layers = self._named(modules)
        blocked = [name for name, layer in layers.items() if getattr(layer.config, "enable_fsdp_float8_all_gather", 0)]
        if high_precision and blocked:
            raise ActionError(f"weights are gathered in FP8, BF16 at the next restart: {', '.join(blocked)}")
        for name, layer in layers.items():
            if high_precision == ("forward" in vars(layer)):
                continue
            vars(layer).pop(_RAN, None)
            forget_precision(layer)
            if (hook := self._first_runs.pop(name, None)) is not None:
                hook.remove()
            if high_precision:
                # Not a bound method, which pickle would look up by name in the class.
                layer.forward = functools.partial(_bf16_forward, layer)
            else:
                del layer.forward
                self._first_runs[name] = layer.register_forward_hook(StaysHere(self._note_first_run(name)))

    def ran_high_precision(self, modules: Sequence[str]) -> list[bool | None]:
        """Whether each layer's last forward was in high precision; None: unknown, or none since the switch."""
        return [
            vars(layer)[_RAN] if _RAN in vars(layer) else noted_precision(layer)
            for layer in self._named(modules).values()
        ]

    def repair_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Not possible: raises `ActionError` with the reason."""
        raise ActionError(STATELESS)

    def scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Not possible: raises `ActionError` with the reason."""
        raise ActionError(STATELESS)

    def highest_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Not possible: raises `ActionError` with the reason."""
        raise ActionError(STATELESS)

    def margin(self) -> float | None:
        """None: the recipe has no margin."""
        return None

    def set_margin(self, margin: float) -> None:
        """Not possible: raises `ActionError` with the reason."""
        raise ActionError(NO_MARGIN)

    def state_dict(self) -> dict[str, object]:
        """Empty: torchao's layers are stateless."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing to restore."""

    def _note_first_run(self, name: str) -> Callable[..., None]:
        def note(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                vars(module)[_RAN] = False
                self._first_runs.pop(name).remove()

        return note

    def _layers(self) -> dict[str, Any]:
        return {name: module for name, module in self._model.named_modules() if is_float8_linear(module)}

    def _named(self, modules: Sequence[str]) -> dict[str, Any]:
        layers = self._layers()
        if unknown := [name for name in modules if name not in layers]:
            raise ActionError(f"no torchao float8 layer named {', '.join(unknown)}")
        return {name: layers[name] for name in modules}


def _bf16_linear(self: Any, input: torch.Tensor) -> torch.Tensor:
    """`nn.Linear.forward` on BF16 operands (autocast's dtype under autocast); same output dtype as the FP8 layer."""
    device = input.device.type
    is_autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_autocast else torch.bfloat16
    bias = None if self.bias is None else self.bias.to(dtype)
    output = F.linear(input.to(dtype), self.weight.to(dtype), bias)
    return output if is_autocast else output.to(input.dtype)


def _bf16_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        output: torch.Tensor = noted_forward(_bf16_linear, self, input, True)
        return output
    output = _bf16_linear(self, input)
    vars(self)[_RAN] = True
    owner = id(self.linear_mm_config)
    with taps.in_forward():
        taps.tell_high_precision(owner, "input", input)
        taps.tell_high_precision(owner, "weight", self.weight)
    if output.requires_grad:
        output.register_hook(lambda grad: taps.tell_high_precision(owner, "grad_output", grad))  # type: ignore[no-untyped-call]
    return output
