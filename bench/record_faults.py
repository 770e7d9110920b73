"""More faults for the recorded corpus, besides the demo's: causes that look alike in the loss.

Each is a real fault of a real training; like the demo's injectors, they share nothing with the detectors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fp8watch.demo.data import NUM_BYTES, Item
from fp8watch.demo.scenarios.base import Fault, OneOff
from fp8watch.demo.schedule import Schedule
from fp8watch.demo.trainer import Training
from fp8watch.emulation import Fp8Linear, ScalingState


def fp8_layers(model: nn.Module) -> list[Fp8Linear]:
    return [module for module in model.modules() if isinstance(module, Fp8Linear)]


class MarginTooLarge(OneOff):
    """precision: the recipe's margin becomes 16 bits, and E4M3 keeps three steps for a whole tensor.

    Every scale is the one that window and margin demand; the demand is wrong. Looks like scales stuck too small
    (`ScalesLost`)."""

    BITS = 16.0

    def happen(self, model: nn.Module) -> None:
        for layer in fp8_layers(model):
            layer.recipe.margin = self.BITS


class OutlierGrowth(OneOff):
    """precision: one SwiGLU channel grows by a quarter bit per step to 2^15, and the weights that read it shrink
    likewise.

    The layer computes the same function, so nothing would show in BF16; in FP8 the channel takes the range of its
    tensor, and the other channels round to zero. The channel gets no gradient while it grows, or Adam would make
    another fault of it. Looks like a slow divergence for any other reason (`CreepingRate`).
    """

    RATE = 2.0**0.25
    NUM_STEPS = 60

    def __init__(self, fault_step: int, layer: str) -> None:
        super().__init__(fault_step)
        self._mlp = layer.rsplit(".", 1)[0]
        self._left = 0
        self._channel = 0

    def happen(self, model: nn.Module) -> None:
        mlp = model.get_submodule(self._mlp)
        weight = mlp.get_submodule("down").weight
        assert isinstance(weight, torch.Tensor)
        self._channel = int(weight.detach().abs().amax(dim=0).argmax())
        self._left = self.NUM_STEPS
        rows, columns = self._parts()
        rows.register_hook(partial(_without, index=(self._row(),)))
        columns.register_hook(partial(_without, index=(slice(None), self._channel)))

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        super().before_step(step)
        if self._left:
            self._left -= 1
            rows, columns = self._parts()
            rows[self._row()] *= self.RATE
            columns[:, self._channel] /= self.RATE

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._model is not None
        mlp = self._model.get_submodule(self._mlp)
        rows, columns = mlp.get_submodule("gate_up").weight, mlp.get_submodule("down").weight
        assert isinstance(rows, torch.Tensor)
        assert isinstance(columns, torch.Tensor)
        return rows, columns

    def _row(self) -> int:
        return len(self._parts()[0]) // 2 + self._channel


def _without(gradient: torch.Tensor, *, index: tuple[Any, ...]) -> torch.Tensor:
    kept = gradient.clone()
    kept[index] = 0.0
    return kept


class _Deaf(ScalingState):
    """A scaling state whose update changes another buffer than the casts read."""

    def update(self, recipe: object, amax: torch.Tensor) -> None:
        scale = self.scale.clone()
        super().update(recipe, amax)  # type: ignore[arg-type]
        self.scale.copy_(scale)


class ScalesLost(OneOff):
    """bookkeeping: every scale is 1 again, as in a newly made state, and no update reaches it."""

    def happen(self, model: nn.Module) -> None:
        for layer in fp8_layers(model):
            for state in (layer.scaling_forward, layer.scaling_backward):
                state.scale.fill_(1.0)
                state.__class__ = _Deaf


class MomentsLost(OneOff):
    """optimisation: the second moments become a ten-thousandth of what they were, as after a bad restore of the
    optimizer: with an unchanged learning rate the updates are 100x too large at first."""

    FACTOR = 1e-4

    def __init__(self, fault_step: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(fault_step)
        self._optimizer = optimizer

    def happen(self, model: nn.Module) -> None:
        for state in self._optimizer.state.values():
            state["exp_avg_sq"].mul_(self.FACTOR)


def _creeping(step: int, *, schedule: Schedule, first: int, rate: float, most: float) -> float:
    return schedule(step) * min(most, rate ** max(0, step - first + 1))


class CreepingRate(Fault):
    """optimisation: the learning rate grows by 6 % per step, to 30x."""

    RATE, MOST = 1.06, 30.0

    def __init__(self, fault_step: int) -> None:
        self._first = fault_step - 1

    def schedule(self, schedule: Schedule) -> Schedule:
        return partial(_creeping, schedule=schedule, first=self._first, rate=self.RATE, most=self.MOST)


class _OtherTongue(Dataset[Item]):
    """From sample `first` on, the bytes are permuted: the same text in another alphabet."""

    def __init__(self, dataset: Dataset[Item], first: int) -> None:
        self._dataset, self._first = dataset, first
        self._alphabet = torch.randperm(NUM_BYTES, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        inputs, targets, weight = self._dataset[index]
        if index >= self._first:
            inputs, targets = self._alphabet[inputs], self._alphabet[targets]
        return inputs, targets, weight


class DataShift(Fault):
    """data: from one batch on the text has another distribution, for good: the loss jumps, and the model learns it."""

    def __init__(self, fault_step: int, batch_size: int) -> None:
        self._first = (fault_step - 1) * batch_size

    def dataset(self, dataset: Dataset[Item]) -> Dataset[Item]:
        return _OtherTongue(dataset, self._first)


class DeadRows(OneOff):
    """hardware: one in 64 of a weight's rows reads as garbage from now on (a bad page): finite, 2^9 times the size, and
    set again before each step. Looks like a bad batch at first and like a divergence later."""

    FACTOR = 2.0**9

    def __init__(self, fault_step: int, layer: str) -> None:
        super().__init__(fault_step)
        self._layer = layer
        self._garbage: torch.Tensor | None = None

    @torch.no_grad()
    def happen(self, model: nn.Module) -> None:
        weight = self._weight()
        rows = max(1, len(weight) // 64)
        self._garbage = weight[:rows].clone() * self.FACTOR

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        super().before_step(step)
        if self._garbage is not None:
            self._weight()[: len(self._garbage)] = self._garbage

    def _weight(self) -> torch.Tensor:
        assert self._model is not None
        weight = self._model.get_submodule(self._layer).weight
        assert isinstance(weight, torch.Tensor)
        return weight


Make = Callable[[Training, int, str], Fault]
"""Training, fault step, layer."""

FAULTS: dict[str, tuple[str, str, Make]] = {
    "margin-too-large": ("precision", "", lambda training, step, layer: MarginTooLarge(step)),
    "outlier-growth": ("precision", "blocks.2.mlp.down", lambda training, step, layer: OutlierGrowth(step, layer)),
    "scales-lost": ("bookkeeping", "", lambda training, step, layer: ScalesLost(step)),
    "moments-lost": ("optimisation", "", lambda training, step, layer: MomentsLost(step, training.optimizer)),
    "creeping-rate": ("optimisation", "", lambda training, step, layer: CreepingRate(step)),
    "data-shift": ("data", "", lambda training, step, layer: DataShift(step, training.config.batch_size)),
    "dead-rows": ("hardware", "blocks.1.attention.proj", lambda training, step, layer: DeadRows(step, layer)),
}
"""Name -> cause, default layer (empty: none), fault."""
