"""Trained parameters that never get a gradient: an adapter that is not called, a branch cut off by `detach`.

The norm over all gradients does not show them, because other parameters have one. The check only tests on the host
whether `.grad` is None, and waits for nothing. To be cheap, it looks at all parameters only now and then, and at those
without a gradient in every update that follows, until they get one, are frozen, or have been without for long enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

LOOK_EVERY = 256
"""Updates between two looks at all parameters (0.1 us per parameter), which also find parameters unfrozen mid-run."""
PATIENCE = 20
"""Updates without a gradient before it is reported: an expert may get no tokens in one step."""


class MissingGradients:
    """Finds the parameters of one optimizer that get no gradient, by their names in the model."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._updates = 0
        self._without: dict[int, tuple[torch.Tensor, int]] = {}
        """Parameters without a gradient, each with the update at which that was first seen; by id."""
        self._told: set[int] = set()

    def count(self) -> bool:
        """Call at an update, when its gradients are complete. Returns whether `look` has anything to do in it."""
        self._updates += 1
        return bool(self._without) or self._updates % LOOK_EVERY == 1

    def look(self) -> list[str]:
        """Call after `count` where that is so. Returns the names of parameters without a gradient for
        `PATIENCE` updates, each name once. A step in which no parameter has a gradient adds no candidates."""
        if self._updates % LOOK_EVERY == 1:
            self._collect()
        if not self._without:
            return []
        found = []
        for key, (parameter, since) in list(self._without.items()):
            if parameter.grad is not None or not parameter.requires_grad:
                del self._without[key]
            elif self._updates - since >= PATIENCE:
                del self._without[key]
                self._told.add(key)
                found.append(parameter)
        return self._names(found) if found else []

    def _collect(self) -> None:
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        without = [parameter for parameter in trained if parameter.grad is None]
        if len(without) == len(trained):
            return
        for parameter in without:
            if id(parameter) not in self._told:
                self._without.setdefault(id(parameter), (parameter, self._updates))

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _names(self, parameters: list[torch.Tensor]) -> list[str]:
        known = {id(parameter): name for name, parameter in self._model.named_parameters()}
        places = {id(parameter): i for i, parameter in enumerate(self._parameters())}
        return [known.get(id(p)) or f"the optimizer's parameter {places.get(id(p), '?')}" for p in parameters]
