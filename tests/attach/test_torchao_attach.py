"""A torchao run under attach: what is seen, what is not, and a layer sent to BF16 and back."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from watched_training import command

pytest.importorskip("torchao", reason="torchao is not installed")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import fp8watch
from fp8watch.actions.bf16_layers import Bf16Layers
from fp8watch.actions.raise_margin import RaiseMargin
from fp8watch.actions.repair_scale import RepairScale
from fp8watch.capture.torchao.controls import TorchaoControls
from fp8watch.columns import unpack
from fp8watch.records import CommandResult, Layout, StepFrame


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def training():
    torch.manual_seed(0)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    model = convert_to_float8_training(Model(), config=config)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def steps(model, optimizer, watch, count):
    for _ in range(count):
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)


def test_coverage_is_told_and_idle_layer_is_named(channel, training):  # case: HOK-01, NUM-19
    model, optimizer = training
    watch = fp8watch.attach(model, optimizer, run="r")
    steps(model, optimizer, watch, 4)
    layout = channel().of(Layout)[-1]
    assert (layout.observed_modules, layout.expected_modules) == (2, 3)
    assert {column.module for column in layout.columns} == {"up", "down"}
    assert [entry.split(":")[0] for entry in watch.not_observable] == ["spare"]
    watch.detach()
    frames = channel().of(StepFrame)
    amax, valid = unpack(frames[-1].columns["amax"])
    assert len(amax) == 6
    assert (amax > 0).all()
    assert valid is None or valid.all()


def test_layer_goes_to_bf16_and_back_by_command(channel, training):
    model, optimizer = training
    watch = fp8watch.attach(model, optimizer, run="r", policy="auto")
    steps(model, optimizer, watch, 2)
    channel().replies.append(command("bf16_layers", params={"layers": ["up"]}))
    steps(model, optimizer, watch, 4)
    results = [(r.status, r.readback) for r in channel().of(CommandResult)]
    assert results == [("applied", "pending"), ("applied", "ok")]
    assert channel().of(StepFrame)[-1].scalars["bf16_modules"] == 1.0
    channel().replies.append(command("bf16_layers", verb="revert", sequence=2))
    steps(model, optimizer, watch, 3)
    assert channel().of(StepFrame)[-1].scalars["bf16_modules"] == 0.0
    assert "forward" not in vars(model.up)


def test_actions_on_scales_are_unavailable_with_the_reason(training):
    context = SimpleNamespace(controls=TorchaoControls(training[0]), elsewhere=())
    assert "keeps none" in RepairScale(context).unavailable()
    assert "no margin" in RaiseMargin(context).unavailable()
    assert Bf16Layers(context).unavailable() is None
