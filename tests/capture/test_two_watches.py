"""Teacher and student, each with a watch, in one process: neither affects the other, whichever leaves first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kept_transport import keep_messages
from torch import nn

import fp8watch.training.attachment as attachment
from fp8watch.capture import sources
from fp8watch.capture.te.source import TeSource
from fp8watch.capture.te.tap import UPDATE
from fp8watch.emulation import convert
from fp8watch.emulation.taps import all_taps, all_value_taps
from fp8watch.settings import Settings


class Emulated:
    """Models whose casts the process knows."""

    def model(self, names: list[str]) -> nn.Module:
        torch.manual_seed(len(names))
        model = nn.Sequential()
        for name in names:
            model.add_module(name, nn.Linear(16, 16))
        convert(model)
        return model

    def run(self, models: list[nn.Module]) -> None:
        """As in distillation: one input, one backward pass through all of them."""
        x = torch.randn(4, 16)
        sum(model(x * (1 + 100 * i)).square().mean() for i, model in enumerate(models)).backward()

    def is_clean(self) -> bool:
        return not list(all_taps()) and not list(all_value_taps())


class FromTe(nn.Module):
    """A module with the state of Transformer Engine's delayed scaling."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fp8 = nn.Parameter(torch.randn(4, 4)), True
        self.fp8_meta = {
            "recipe": SimpleNamespace(margin=0, amax_compute_algo="max", fp8_format="Format.HYBRID"),
            "scaling_fwd": SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(16, 3)),
            "scaling_bwd": SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(16, 2)),
        }


FromTe.__name__ = "Linear"


class TransformerEngine:
    """One buffer of the process for all models, updated once a direction."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.extension = SimpleNamespace(**{UPDATE: lambda *_: None})
        self.original = getattr(self.extension, UPDATE)
        monkeypatch.setattr(
            sources, "find",
            lambda model: sources.Found(
                sources=[TeSource(model, extension=self.extension)], framework="Transformer Engine"
            ),
        )  # fmt: skip

    def model(self, names: list[str]) -> nn.Module:
        return nn.ModuleDict({name: FromTe() for name in names})

    def run(self, models: list[nn.Module]) -> None:
        layers = [(i, layer) for i, model in enumerate(models) for layer in model.values()]
        for key, amax in (("scaling_fwd", 3.0), ("scaling_bwd", 0.25)):
            states = [layer.fp8_meta[key] for _, layer in layers]
            vector = torch.cat([
                torch.full_like(state.scale, amax * (1 + 100 * i))
                for (i, _), state in zip(layers, states, strict=True)
            ])  # fmt: skip
            scales = [state.scale for state in states]
            getattr(self.extension, UPDATE)(vector, [state.amax_history for state in states], scales)
        for _, layer in layers:
            layer.weight.grad = torch.zeros_like(layer.weight)

    def is_clean(self) -> bool:
        return getattr(self.extension, UPDATE) is self.original


NAMES = [["t1", "t2"], ["s1"]]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("framework", ["emulated", "transformer_engine"])
def test_nothing_leaks_and_either_may_leave_first(framework, first, monkeypatch):
    keep_messages(monkeypatch)
    library: Any = Emulated() if framework == "emulated" else TransformerEngine(monkeypatch)
    models = [library.model(names) for names in NAMES]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    watches = [
        attachment.attach(model, optimizer, run=name, settings=Settings(report=False))
        for model, optimizer, name in zip(models, optimizers, ("teacher", "student"), strict=True)
    ]
    channels = [watch._session.uplink._channel for watch in watches]

    def step() -> None:
        library.run(models)
        for watch, optimizer in zip(watches, optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            watch.step(1.0)

    def amax(i: int) -> dict[str, float]:
        columns = watches[i]._recorder.layout.columns
        values = np.frombuffer(channels[i].frames[-1].columns["amax"].data, "<f4")
        assert len(values) == len(columns)
        return dict(zip([column.name for column in columns], values.tolist(), strict=True))

    for _ in range(3):
        step()
    seen = [amax(0), amax(1)]
    for i, names in enumerate(NAMES):
        assert {name.partition(":")[0] for name in seen[i]} == set(names)
        assert {frame.run for frame in channels[i].frames} == {watches[i].run}
    assert seen[1]["s1:input"] > 20 * seen[0]["t1:input"]

    stays = 1 - first
    watches[first].detach()
    left = len(channels[first].frames)
    for _ in range(3):
        step()
    assert len(channels[first].frames) == left
    assert set(amax(stays)) == set(seen[stays])
    assert all(amax(stays)[name] > 0 for name in seen[stays] if name.endswith(":input"))
    assert watches[stays].failures == {}
    assert not library.is_clean()
    watches[stays].detach()
    assert library.is_clean()
