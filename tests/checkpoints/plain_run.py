"""A plain training run (no FP8) for tests of checkpoints alone."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from fp8watch.checkpoints import Checkpoints
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.parts import TrainingParts


class Position:
    """A data position that is a number."""

    unavailable: str | None = None

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any], skip_batches: int = 0) -> None:
        self.samples = state["samples"] + skip_batches


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.last(torch.dropout(self.norm(self.first(inputs)), 0.1, self.training))
        return out


class PlainRun:
    _writers: ClassVar[weakref.WeakValueDictionary[Path, CheckpointManager]] = weakref.WeakValueDictionary()

    def __init__(
        self, root: Path, *, scheduler: Any = None, scaler: Any = None, opens: bool = True, **config: Any
    ) -> None:
        """`opens` False: the test gives it a manager."""
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.data = Position()
        self.parts = TrainingParts(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, scaler=scaler, data=self.data
        )
        self.scaler = scaler
        self.attempt = 0
        self.step_number = 0
        self.config = Checkpoints(root, **config)
        if opens:
            self.manager = self.open()

    def open(self) -> CheckpointManager:
        """A new manager on the same directory, as after a restart: what the process before it had locked is free."""
        ticks = iter(range(1000, 10**9))
        root = Path(self.config.path)
        if (before := self._writers.get(root)) is not None:
            assert before._owner is not None
            before._owner.release()
        manager = self._writers[root] = CheckpointManager(
            self.config, self.parts, run="r", attempt=lambda: self.attempt, clock=lambda: float(next(ticks))
        )
        return manager

    def step(self) -> float:
        inputs = torch.randn(8, 4)
        self.data.samples += 8
        loss = (self.model(inputs) - inputs).square().mean()
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        return loss.item()

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def save(self) -> str:
        return self.manager.save(self.step_number).checkpoint

    def bits(self) -> list[Any]:
        tensors = [*self.model.state_dict().values(), self.model.seen]
        tensors += [v for state in self.optimizer.state.values() for v in state.values()]
        return [tensor.tolist() for tensor in tensors] + [self.data.samples, torch.get_rng_state().tolist()]
