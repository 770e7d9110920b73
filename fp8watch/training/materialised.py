"""Checks that parameters have values: those of uninitialised lazy modules and those on the meta device have none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

from fp8watch.training.report import listed

SHOWN = 4
"""Most names in a message; the rest is counted."""
LAZY = "not initialised (lazy modules): run one forward, then make the optimizer and attach"
META = (
    "on the meta device, without values: materialise the model (to_empty(device=...), then initialise or load it), "
    "make the optimizer from it, and attach then"
)


def of_model(model: torch.nn.Module, optimizer: object) -> str | None:
    """Which parameters of the model have no values, and what to do about it; None: all have values.

    A parameter on the meta device is accepted unless the optimizer updates it, because another process may hold it.
    """
    updated = {id(parameter) for _, parameter in _updated(optimizer)}
    named = list(model.named_parameters())
    return _reasons(
        [name for name, parameter in named if is_lazy(parameter)],
        [name for name, parameter in named if id(parameter) in updated and _is_on_meta(parameter)],
    )


def of_optimizer(optimizer: object, model: object) -> str | None:
    """The same for parameters of the optimizer that are not in the model. If a model is materialised after its
    optimizer was made, the optimizer still holds the old parameters."""
    own = {id(parameter) for parameter in model.parameters()} if isinstance(model, torch.nn.Module) else set()
    named = [(name, parameter) for name, parameter in _updated(optimizer) if id(parameter) not in own]
    return _reasons(
        [name for name, parameter in named if is_lazy(parameter)],
        [name for name, parameter in named if _is_on_meta(parameter)],
    )


def _updated(optimizer: object) -> Iterable[tuple[str, torch.Tensor]]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"param_groups[{number}]['params'][{index}]", parameter


def _is_on_meta(parameter: torch.Tensor) -> bool:
    return not is_lazy(parameter) and parameter.device.type == "meta"


def _reasons(lazy: Sequence[str], meta: Sequence[str]) -> str | None:
    found = [(names, why) for names, why in ((lazy, LAZY), (meta, META)) if names]
    return (
        "; ".join(f"{listed(names, SHOWN)} {'is' if len(names) == 1 else 'are'} {why}" for names, why in found) or None
    )
