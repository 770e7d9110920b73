"""What a scenario is, and where a fault can enter a training.

Some faults happen once in wall-clock time (a bit flips, a buffer is overwritten) and do not come back after a rollback.
Others are tied to something that a rollback rewinds, the data or the schedule, and do come back. Each scenario says
which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from fp8watch.demo.config import TrainingConfig
from fp8watch.demo.data import Item
from fp8watch.demo.schedule import Schedule


class Fault:
    """No fault. Subclasses override the place where their fault enters."""

    def schedule(self, schedule: Schedule) -> Schedule:
        """The schedule that the run uses."""
        return schedule

    def dataset(self, dataset: Dataset[Item]) -> Dataset[Item]:
        """The data that the run uses."""
        return dataset

    def enter(self, model: nn.Module) -> None:
        """Called when the model has been built and converted to FP8, before training."""

    def before_step(self, step: int) -> None:
        """Called when step `step` (counted from 1) begins, also for replayed steps."""


class OneOff(Fault, ABC):
    """A fault that happens once, when step `fault_step` begins for the first time."""

    def __init__(self, fault_step: int) -> None:
        self._fault_step = fault_step
        self._has_happened = False
        self._model: nn.Module | None = None

    def enter(self, model: nn.Module) -> None:
        """Remember the model."""
        self._model = model

    def before_step(self, step: int) -> None:
        """Let it happen when its step begins."""
        if self._has_happened or step != self._fault_step:
            return
        self._has_happened = True
        assert self._model is not None
        self.happen(self._model)

    @abstractmethod
    def happen(self, model: nn.Module) -> None:
        """Inject the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a fault is built from."""

    config: TrainingConfig
    fault_step: int
    layer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One entry of `fp8watch demo --list`."""

    name: str
    family: str
    """Kind of trouble, for people; nothing that finds trouble reads it."""
    summary: str
    make: Callable[[Setting], Fault]
    recurs: str
    """Whether it comes back when steps are replayed, and why."""
    layer: str | None = None
    """Default of `--layer`; None with `takes_layer`: all layers."""
    takes_layer: bool = False
    takes_fault_step: bool = True
    needs_scales: bool = False
    """The fault is in what the engine keeps between steps."""
    fault_share: float = 0.5
    """Default of `--fault-step` as a share of the steps."""
    both: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainingConfig` set for this scenario's runs and their healthy twin."""
    faulty: Mapping[str, Any] = field(default_factory=dict)
    """Fields set for the faulty runs only: the fault is in the configuration."""
