"""Optimizers of others that answer with errors when they are looked at: the loop goes on as it would alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from watched_training import Trainer

import fp8watch


class Proxy(torch.optim.Optimizer):
    """What it does not have is an error of its own, and none that `getattr` knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("clips", [False, True])
def test_none_of_its_errors_reaches_the_loop(trainer: Trainer, channel: Callable[[], Any], clips: bool) -> None:
    trainer.optimizer = Proxy(trainer.model.parameters())
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    for _ in range(4):
        trainer.model(torch.ones(2, next(trainer.model.parameters()).shape[-1])).sum().backward()
        if clips:
            watch.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        watch.step(0.5)
    assert watch.global_step == 4
    # Whether its gradients carry a loss scale is not known then; that is said, as in the layout.
    assert set(watch.failures) <= {"grad_norm"}
