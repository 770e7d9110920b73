"""The paths that exist on an accelerator only; left out, by name, on machines without one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8watch.actions.clip_control import ClipControl
from fp8watch.actions.lr_control import LrControl
from fp8watch.actions.lr_rules import Hold
from fp8watch.actions.skip_guard import SkipGuard
from fp8watch.checkpoints import Checkpoints
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.parts import TrainingParts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


class Run:
    def __init__(self, root: Path, *, lr: float | torch.Tensor = 1e-2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 16)).cuda()
        capturable = isinstance(lr, torch.Tensor)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True, capturable=capturable)
        self.clip = ClipControl(self.optimizer)
        self.skip = SkipGuard(self.optimizer, self.clip)
        self.lr = LrControl(self.optimizer)
        parts = TrainingParts(model=self.model, optimizer=self.optimizer)
        self.manager = CheckpointManager(Checkpoints(root), parts, run="gpu", attempt=lambda: 0)
        self.inputs = torch.randn(8, 16, device="cuda")
        self.spoil: float | None = None

    def step(self) -> torch.Tensor:
        loss = (self.model(self.inputs) - self.inputs).square().mean()
        loss.backward()
        if self.spoil is not None:
            next(self.model.parameters()).grad[0].fill_(self.spoil)  # type: ignore[index]
        self.clip.clip_grad_norm_(self.model.parameters(), 1.0)
        self.clip.before_step()
        if not self.skip.before_step():
            self.lr.enter()
            try:
                self.optimizer.step()
            finally:
                self.lr.leave()
        self.skip.after_step()
        self.optimizer.zero_grad()
        self.clip.take()
        return loss.detach()

    def bits(self) -> list[object]:
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        return [tensor.tolist() for tensor in [*self.model.parameters(), *states]]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_armed_steps_wait_for_nothing_and_a_bad_one_is_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path, lr=torch.tensor(1e-2, device="cuda"))
    run.skip.arm("test")
    run.clip.set_limit(0.5)
    run.lr.add("half", Hold(begin=0, steps=None, factor=0.5))
    run.lr.add("level", Hold(begin=0, steps=None, ceilings=[2e-3]))
    run.step()
    before = run.bits()
    run.spoil = math.nan
    torch.cuda.set_sync_debug_mode("error")  # any synchronisation raises
    try:
        run.step()
        flag = run.skip.last_skipped
        run.spoil = None
        run.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(flag, torch.Tensor)
    assert float(flag) == 1.0
    assert float(run.skip.last_skipped) == 0.0
    assert float(run.lr.effective[0]) == pytest.approx(2e-3)
    assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2)
    assert run.bits() != before


def test_parameters_moments_and_counter_stay(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.skip.arm("test")
    run.step()
    before = run.bits()
    run.spoil = math.inf
    run.step()
    assert run.bits() == before


def test_a_replay_is_bit_identical(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(3):
        run.step()
    record = run.manager.save(3)
    losses = [run.step().item() for _ in range(4)]
    bits = run.bits()
    places = [parameter.data_ptr() for parameter in run.model.parameters()]
    run.manager.restore(record.checkpoint, allow_without_data=True)
    assert [run.step().item() for _ in range(4)] == losses
    assert run.bits() == bits
    assert [parameter.data_ptr() for parameter in run.model.parameters()] == places
