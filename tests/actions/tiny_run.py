"""A small real training run with every control in place, in the order in which the core calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.clip_control import ClipControl
from fp8watch.actions.context import ActionContext
from fp8watch.actions.lr_control import LrControl
from fp8watch.actions.registry import build_actions
from fp8watch.actions.skip_guard import SkipGuard
from fp8watch.capture.emulated_controls import EmulatedControls
from fp8watch.checkpoints import Checkpoints
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.emulation import DelayedScaling, convert
from fp8watch.training.data import Batches

WIDTH = 32
BATCH = 8


def warmup(peak_at: int) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / peak_at)


def make_model(*, fp8: bool = True, dropout: float = 0.1) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Linear(WIDTH, 16))
    if fp8:
        convert(model, DelayedScaling(amax_history_len=4))
    return model


def make_optimizer(kind: str, model: nn.Module, lr: Any = 1e-2) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": lr}, {"params": parameters[2:], "lr": lr}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if kind == "foreach":
        return torch.optim.AdamW(groups, lr=lr, foreach=True)
    if kind == "fused":
        return torch.optim.AdamW(groups, lr=lr, fused=True)
    if kind == "tensor":
        for group in groups:
            group["lr"] = torch.tensor(1e-2)
        return torch.optim.AdamW(groups, lr=torch.tensor(1e-2), foreach=False)
    raise ValueError(kind)


class TinyRun:
    """`step()` is one optimizer step and its boundary."""

    def __init__(
        self,
        root: Path | None = None,
        *,
        kind: str = "foreach",
        fp8: bool = True,
        seed: int = 0,
        clip: float | None = 1.0,
        peak_at: int = 8,
        every: int | None = None,
        scaler: Any = None,
        schedule: Callable[[int], float] | None = None,
        with_data: bool = True,
    ) -> None:
        torch.manual_seed(seed)
        self.model = make_model(fp8=fp8)
        self.optimizer = make_optimizer(kind, self.model)
        self.scheduler = LambdaLR(self.optimizer, schedule or warmup(peak_at))
        self.scaler = scaler
        source = torch.Generator().manual_seed(seed + 1)
        inputs = torch.randn(96, 16, generator=source)
        targets = inputs.roll(1, dims=1) * 0.5
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True)
        self.data = Batches(loader)
        self._clip_limit = clip
        self.spoil: Callable[[], None] | None = None
        """Called between backward and clipping."""
        self.global_step = 0
        self.attempt = 0
        self.losses: list[float] = []
        self.notes: list[str] = []
        parts = TrainingParts(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=scaler,
            controls=EmulatedControls(self.model) if fp8 else None,
            data=self.data if with_data else None,
        )
        self.manager = (
            CheckpointManager(Checkpoints(root, every=every), parts, run="tiny", attempt=lambda: self.attempt)
            if root is not None
            else None
        )
        clip_control = ClipControl(self.optimizer)
        self.context = ActionContext(
            parts=parts,
            lr=LrControl(self.optimizer, self.scheduler),
            clip=clip_control,
            skip=SkipGuard(self.optimizer, clip_control, scaler),
            checkpoints=self.manager,
            step=lambda: self.global_step,
            attempt=lambda: self.attempt,
            rewind=self._rewind,
            note=self.notes.append,
        )
        self.actions = build_actions(self.context)
        self._batches = self._endless()

    def _endless(self) -> Any:
        while True:
            yield from self.data

    def _rewind(self, step: int) -> None:
        self.global_step = step
        self.attempt += 1

    def step(self) -> float:
        """One step; its loss."""
        inputs, targets = next(self._batches)
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        if self.spoil is not None:
            self.spoil()
        if self._clip_limit is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.context.clip.clip_grad_norm_(self.model.parameters(), self._clip_limit)
        self._update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.global_step += 1
        self.context.clip.take()
        self.losses.append(loss.item())
        if self.manager is not None:
            self.manager.maybe_save(self.global_step)
        return loss.item()

    def _update(self) -> None:
        context = self.context
        context.clip.before_step()
        try:
            if context.skip.before_step():
                self.optimizer._opt_called = True  # type: ignore[attr-defined]
                return
            context.lr.enter()
            try:
                if self.scaler is not None:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                else:
                    self.optimizer.step()
            finally:
                context.lr.leave()
        finally:
            context.skip.after_step()

    def run(self, steps: int) -> list[float]:
        """Several steps; their losses."""
        return [self.step() for _ in range(steps)]

    def apply(self, name: str, **params: Any) -> Applied:
        """Apply an action at this boundary."""
        return self.actions[name].apply(self.global_step, params)

    def read_back(self, name: str, applied: Applied) -> ReadBack:
        """Read it back."""
        return self.actions[name].read_back(applied)

    def lrs(self) -> list[float]:
        """What the parameter groups hold between steps."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def everything(run: TinyRun) -> dict[str, Any]:
    """All state that training depends on, cloned, with bits comparable by `same`."""
    import random

    import numpy as np

    controls = run.context.controls
    return {
        "model": {name: value.clone() for name, value in run.model.state_dict().items()},
        "optimizer": clone(run.optimizer.state_dict()),
        "scheduler": clone({k: v for k, v in run.scheduler.state_dict().items()}),
        "fp8": clone(controls.state_dict()) if controls is not None else None,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state(legacy=True)],
        "samples": run.data.samples,
        "step": run.global_step,
    }


def clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(clone(item) for item in value)
    return value


def same(a: Any, b: Any) -> bool:
    """Equal to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
