"""Whether parameters are there yet: those of lazy modules and those on the meta device have no values to watch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

from fp8watch.training.report import listed

SHOWN = 4
"""Names in a message; of more it is said how many."""
LAZY = "not initialised (lazy modules): run one forward, then make the optimizer and attach"
META = (
    "on the meta device, without values: materialise the model (to_empty(device=...), then initialise or load it), "
    "make the optimizer from it, and attach then"
)


def of_model(model: torch.nn.Module, optimizer: object) -> str | None:
    """What of the model is not there yet, and what to do; None: all of it is.

    On the meta device only what the optimizer is to update counts: a process may leave there what others hold.
    """
    updated = {id(parameter) for _, parameter in _updated(optimizer)}
    named = list(model.named_parameters())
    return _reasons(
        [name for name, parameter in named if is_lazy(parameter)],
        [name for name, parameter in named if id(parameter) in updated and _is_on_meta(parameter)],
    )


def of_optimizer(optimizer: object, model: object) -> str | None:
    """The same of parameters that the optimizer holds and the model does not: the optimizer of a model that was
    materialised after it goes on with what the model has let go of."""
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
