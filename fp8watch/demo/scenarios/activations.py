"""Faults in one layer's input, for a step or two."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from fp8watch.demo.scenarios.base import OneOff, Scenario, Setting


class _InputFault(OneOff):
    """Changes the input of one layer in the forwards of `num_steps` steps, beginning with the fault step."""

    num_steps = 1

    def __init__(self, fault_step: int, layer: str) -> None:
        super().__init__(fault_step)
        self._layer = layer
        self._steps_left = 0

    def enter(self, model: nn.Module) -> None:
        """Hook in front of the layer."""
        super().enter(model)
        model.get_submodule(self._layer).register_forward_pre_hook(self._pass)

    def before_step(self, step: int) -> None:
        """End the fault when its steps are over."""
        self._steps_left = max(0, self._steps_left - 1)
        super().before_step(step)

    def happen(self, model: nn.Module) -> None:
        """Change the input from the next forward on."""
        self._steps_left = self.num_steps

    def _pass(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (self.change(args[0]),) if self._steps_left else None

    @abstractmethod
    def change(self, activation: torch.Tensor) -> torch.Tensor:
        """The faulty input for this one, (B, T, features)."""


class NanActivation(_InputFault):
    """One element is NaN in one forward: the loss and every gradient are NaN in that step."""

    def change(self, activation: torch.Tensor) -> torch.Tensor:
        """A copy with the NaN in the middle."""
        faulty = activation.clone()
        faulty.view(-1)[faulty.numel() // 2] = torch.nan
        return faulty


class OutlierChannel(_InputFault):
    """One channel is `FACTOR` times its size for two steps, as a SwiGLU's product does when both factors align."""

    FACTOR = 64.0
    num_steps = 2

    def change(self, activation: torch.Tensor) -> torch.Tensor:
        """The channel with the largest magnitude grows: that is where outliers appear."""
        channel = int(activation.detach().abs().amax(dim=(0, 1)).argmax())
        gain = torch.ones(activation.shape[-1], dtype=activation.dtype, device=activation.device)
        gain[channel] = self.FACTOR
        return activation * gain


def _nan(setting: Setting) -> NanActivation:
    assert setting.layer is not None
    return NanActivation(setting.fault_step, setting.layer)


def _outlier(setting: Setting) -> OutlierChannel:
    assert setting.layer is not None
    return OutlierChannel(setting.fault_step, setting.layer)


SCENARIOS = (
    Scenario(
        name="nan-loss",
        family="precision",
        summary="one NaN activation in one forward: unwatched, every parameter is NaN one step later",
        make=_nan,
        recurs="once",
        layer="blocks.2.mlp.down",
        takes_layer=True,
    ),
    Scenario(
        name="outlier-channel",
        family="outlier",
        summary="one SwiGLU channel blown up for two steps: a bump, no lasting harm",
        make=_outlier,
        recurs="once",
        layer="blocks.2.mlp.down",
        takes_layer=True,
    ),
)
