"""Optimizers of others that answer with errors when they are looked at: the loop goes on as it would alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from watched_training import Trainer

import fp8watch
from fp8watch.capture import gradients
from fp8watch.records import Layout, StepFrame


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
    assert watch.failures == {}
    watch.detach()
    norms = [frame.scalars["grad_norm"] for frame in channel().of(StepFrame)]
    assert len(norms) == 4
    assert all(norm > 0 for norm in norms)


class Scaler:
    """It has what a loss scaler is used by, says not even whether it is enabled, and raises over all else."""

    def __init__(self) -> None:
        self.__dict__["gave"] = 0

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 8

    def is_enabled(self) -> bool:
        raise RuntimeError("ask later")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_scaler_that_says_nothing_is_taken_as_one_that_has_not_unscaled(
    trainer: Trainer, channel: Callable[[], Any], tmp_path: Path
) -> None:
    scaler, checkpoints = Scaler(), fp8watch.Checkpoints(tmp_path / "kept", every=2)
    watch = fp8watch.attach(trainer.model, trainer.optimizer, scaler=scaler, checkpoints=checkpoints)
    for _ in range(4):
        x = torch.ones(2, next(trainer.model.parameters()).shape[-1])
        scaler.scale(trainer.model(x).sum()).backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        watch.step(0.5)
    assert set(watch.failures) <= {"adjust_loss_scale"}  # asked whether it can: it cannot, and says KeyError
    watch.detach()
    frames = channel().of(StepFrame)
    assert len(frames) == 4
    assert all("grad_norm" not in frame.scalars and "learning_rate" in frame.scalars for frame in frames)
    assert any(gradients.SCALED in reason for reason in channel().of(Layout)[-1].not_observable)
    assert len(list((tmp_path / "kept").glob("step-*"))) == 2


class Stands:
    """In the place of `step`, as another library may put it there."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.__dict__["_step"] = step

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)


def test_what_stands_for_step_is_called_and_put_back(trainer: Trainer, channel: Callable[[], Any]) -> None:
    stand_in = Stands(trainer.optimizer.step)
    trainer.optimizer.step = stand_in  # type: ignore[method-assign]
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.steps(watch, 2)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert set(watch.failures) <= {"lengthen_warmup", "rewarm", "hold_lr"}  # as above
    assert "learning_rate" in channel().of(StepFrame)[-1].scalars
    watch.detach()
    assert trainer.optimizer.step is stand_in
