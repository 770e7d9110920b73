"""A training on Transformer Engine rolls back, and resumes in a new process, with its scales and without unpickling.

The library is a stand-in that refuses pickles as TE 2.20 does; tests/gpu/test_gpu_demo.py has the real one.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import double_te
import pytest
import torch
import torch.nn.functional as F

from fp8watch.capture.te.controls import TeControls
from fp8watch.checkpoints import Checkpoints
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.te_extra import make_room, without_pickles
from fp8watch.demo.config import TrainingConfig
from fp8watch.demo.scenarios.base import Fault
from fp8watch.demo.trainer import Training, build

CONFIG = TrainingConfig(steps=20, batch_size=2, length=16, num_layers=1, width=32, amax_history_len=6,
                        engine="transformer_engine")  # fmt: skip
LAYER = "blocks.0.mlp.down"


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    double_te.install(monkeypatch)


class Run:
    """A training and its checkpoints in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.training: Training = build(CONFIG, Fault())
        self.model, self.optimizer = self.training.model, self.training.optimizer
        controls = TeControls(
            self.model,
            library=SimpleNamespace(autocast=double_te.autocast),
            quantization=SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(global_amax_buffer={})),
        )
        parts = TrainingParts(
            model=self.model, optimizer=self.optimizer, scheduler=self.training.scheduler, controls=controls
        )
        clock = iter(range(1000, 10**6))
        self.manager = CheckpointManager(
            Checkpoints(folder), parts, run="r", attempt=lambda: 0, clock=lambda: float(next(clock))
        )

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(step))
            with self.training.region():
                logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
            loss.backward()
            self.optimizer.step()
            self.training.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def states(self) -> list[torch.Tensor]:
        meta = self.model.get_submodule(LAYER).fp8_meta
        return [value for key in ("scaling_fwd", "scaling_bwd") for value in (meta[key].scale, meta[key].amax_history)]


def test_a_rollback_puts_scales_and_windows_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.steps(1, 4)
    name = run.manager.save(4).checkpoint
    kept = [value.clone() for value in run.states()]
    identities = [value.data_ptr() for value in run.states()]
    losses = run.steps(5, 7)
    assert not all(torch.equal(a, b) for a, b in zip(kept, run.states(), strict=True))
    run.manager.restore(name, allow_without_data=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, run.states(), strict=True))
    assert [value.data_ptr() for value in run.states()] == identities, "the update and the casts look there"
    assert run.steps(5, 7) == losses


def test_a_new_process_goes_on_with_the_scales_it_stopped_with(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.steps(1, 4)
    name = run.manager.save(4).checkpoint
    kept, losses = [value.clone() for value in run.states()], run.steps(5, 7)
    run.manager.close(0.0)
    fresh = Run(tmp_path)
    assert "scaling_fwd" not in fresh.model.get_submodule(LAYER).fp8_meta
    fresh.manager.restore(name, allow_without_data=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, fresh.states(), strict=True))
    assert fresh.steps(5, 7) == losses


def test_only_their_blobs_are_left_out() -> None:
    run_model = build(CONFIG, Fault()).model
    blob = torch.arange(5, dtype=torch.uint8)
    state = {f"{LAYER}._extra_state": blob, "elsewhere._extra_state": blob, f"{LAYER}.weight": blob}
    found = without_pickles(run_model, state)
    assert found[f"{LAYER}._extra_state"].numel() == 0
    assert found["elsewhere._extra_state"] is blob
    assert found[f"{LAYER}.weight"] is blob


def test_room_is_made_only_where_there_is_none_and_something_to_put_in() -> None:
    model = build(CONFIG, Fault()).model
    saved = {
        f"{LAYER}/{key}": {"scale": torch.ones(slots), "amax_history": torch.zeros(6, slots)}
        for key, slots in (("scaling_fwd", 3), ("scaling_bwd", 2))
    }
    assert make_room(model, {}) == []
    assert make_room(model, saved) == [LAYER]
    assert model.get_submodule(LAYER).fp8_meta["scaling_fwd"].amax_history.shape == (6, 3)
    assert make_room(model, saved) == []
