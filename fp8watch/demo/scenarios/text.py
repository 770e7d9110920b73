"""Faults in the data itself, so they come back when the same samples are read again."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from fp8watch.demo.data import NUM_BYTES, Item
from fp8watch.demo.scenarios.base import Fault, Scenario, Setting


class _RandomTargets(Dataset[Item]):
    """Samples `first` to `last` (exclusive) have targets unrelated to their inputs."""

    def __init__(self, dataset: Dataset[Item], first: int, last: int) -> None:
        self._dataset = dataset
        self._first, self._last = first, last

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        inputs, targets, weight = self._dataset[index]
        if self._first <= index < self._last:
            generator = torch.Generator().manual_seed(index)
            targets = torch.randint(NUM_BYTES, targets.shape, generator=generator)
        return inputs, targets, weight


class _HeavyBatches(Dataset[Item]):
    """From sample `first` on, one batch in `period` has a loss weight of `factor`."""

    def __init__(self, dataset: Dataset[Item], *, first: int, batch_size: int, period: int, factor: float) -> None:
        self._dataset = dataset
        self._first = first
        self._batch_size = batch_size
        self._period = period
        self._factor = factor

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        inputs, targets, weight = self._dataset[index]
        if index >= self._first and (index - self._first) // self._batch_size % self._period == 0:
            weight = weight * self._factor
        return inputs, targets, weight


class BadBatches(Fault):
    """`NUM_BATCHES` batches with random targets, starting with the batch of step `fault_step`."""

    NUM_BATCHES = 10

    def __init__(self, fault_step: int, batch_size: int) -> None:
        self._first = (fault_step - 1) * batch_size
        self._last = self._first + self.NUM_BATCHES * batch_size

    def dataset(self, dataset: Dataset[Item]) -> Dataset[Item]:
        """The dataset with the bad stretch."""
        return _RandomTargets(dataset, self._first, self._last)


class GradBursts(Fault):
    """One batch in 15 weighs 300 times as much, from the batch of step `fault_step` on."""

    PERIOD = 15
    FACTOR = 300.0

    def __init__(self, fault_step: int, batch_size: int) -> None:
        self._first = (fault_step - 1) * batch_size
        self._batch_size = batch_size

    def dataset(self, dataset: Dataset[Item]) -> Dataset[Item]:
        """The dataset with the heavy batches."""
        return _HeavyBatches(
            dataset, first=self._first, batch_size=self._batch_size, period=self.PERIOD, factor=self.FACTOR
        )


def _bad(setting: Setting) -> BadBatches:
    return BadBatches(setting.fault_step, setting.config.batch_size)


def _bursts(setting: Setting) -> GradBursts:
    return GradBursts(setting.fault_step, setting.config.batch_size)


SCENARIOS = (
    Scenario(
        name="grad-bursts",
        family="optimisation",
        summary="one batch in 15 scaled up 300x, with a clip limit that is no limit",
        make=_bursts,
        recurs="with the data",
        # At 0.95 one burst fills AdamW's second moment for the rest of the demo, and nothing could be saved.
        both={"max_norm": 1000.0, "beta2": 0.9},
        fault_share=0.2,
    ),
    Scenario(
        name="bad-batch",
        family="data",
        summary="10 batches of random targets: the loss jumps and heals",
        make=_bad,
        recurs="with the data",
    ),
)
