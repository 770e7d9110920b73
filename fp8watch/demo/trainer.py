"""The training itself: model, optimizer, schedule and data from a config, and the loop shown in the README.

A watched run passes `fp8watch.attach`'s object to the loop; twin and unwatched runs pass `Bare`, which does with torch
alone what a loop without fp8watch does. There is no other difference between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from fp8watch.demo import schedule
from fp8watch.demo.config import TrainingConfig
from fp8watch.demo.data import Item, Windows, loader
from fp8watch.demo.engines import Region, engine
from fp8watch.demo.model import GPT, Shape
from fp8watch.demo.scenarios.base import Fault

SPARE_BATCHES = 512
"""Samples beyond the steps, in batches, because a rollback may leave batches out."""

Report = Callable[[int, float], None]
"""Called with step and loss."""


class Watched(Protocol):
    """The methods of `fp8watch.Watch` that the loop uses, also implemented by `Bare`."""

    @property
    def global_step(self) -> int:
        """Updates done in this timeline."""

    def batches(self, loader: Iterable[Any], /) -> Iterable[Any]:
        """The loader's batches."""

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip in place; returns the norm before clipping."""

    def step(self, loss: torch.Tensor, /) -> None:
        """End the step."""


class Bare:
    """The same methods without fp8watch."""

    def __init__(self) -> None:
        self.global_step = 0

    def batches(self, loader: Iterable[Any], /) -> Iterator[Any]:
        """The loader's batches as they come."""
        return iter(loader)

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip with torch alone."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, loss: torch.Tensor, /) -> None:
        """Count the update."""
        self.global_step += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All objects of one training."""

    config: TrainingConfig
    model: GPT
    optimizer: torch.optim.AdamW
    scheduler: torch.optim.lr_scheduler.LambdaLR
    loader: DataLoader[Item]
    fault: Fault
    region: Region = nullcontext
    """Context that each forward runs in."""


def build(config: TrainingConfig, fault: Fault) -> Training:
    """A training at step 0; depends on its arguments alone."""
    torch.manual_seed(config.seed)
    model = GPT(Shape(num_layers=config.num_layers, width=config.width, length=config.length))
    model.to(config.device)
    region = engine(config.engine).convert(model, amax_history_len=config.amax_history_len)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, config.beta2))
    plan = schedule.schedule(warmup_steps=config.warmup_steps, steps=config.steps, floor=config.lr_floor)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, fault.schedule(plan))
    num_samples = (config.steps + SPARE_BATCHES) * config.batch_size
    dataset = Windows(seed=config.seed, num_samples=num_samples, length=config.length)
    batches = loader(fault.dataset(dataset), batch_size=config.batch_size)
    fault.enter(model)
    return Training(
        config=config, model=model, optimizer=optimizer, scheduler=scheduler, loader=batches, fault=fault, region=region
    )  # fmt: skip


def train(training: Training, watch: Watched, report: Report) -> None:
    """Train to `config.steps` updates, however many have to be replayed; `report` is called with every step's loss.

    The plain cross-entropy is reported and watched; the optimised loss is weighted by sample.
    """
    config, model, optimizer = training.config, training.model, training.optimizer
    for inputs, targets, weights in watch.batches(training.loader):
        step = watch.global_step + 1
        training.fault.before_step(step)
        with training.region():
            logits = model(inputs.to(config.device))
        losses = F.cross_entropy(logits.transpose(1, 2), targets.to(config.device), reduction="none").mean(dim=1)
        loss = losses.detach().mean()
        (losses * weights.to(config.device)).mean().backward()
        watch.clip_grad_norm_(model.parameters(), max_norm=config.max_norm)
        optimizer.step()
        training.scheduler.step()
        optimizer.zero_grad()
        watch.step(loss)
        report(step, loss.item())
        if watch.global_step >= config.steps:
            return
