"""Reading emulated layers: a step's numbers are right, and reading changes nothing in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8watch.capture.emulated import EmulatedSource
from fp8watch.capture.source import Reading, Source
from fp8watch.emulation import DelayedScaling, Fp8Linear, convert
from fp8watch.emulation.taps import all_taps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)])
        self.head = nn.Linear(16, 16)
        self.skip_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        if not self.skip_second:
            x = x + self.blocks[1](x)
        return self.head(x)


def make(**recipe: Any) -> Net:
    torch.manual_seed(0)
    net = Net()
    convert(net, DelayedScaling(**{"amax_history_len": 4, **recipe}))
    return net


@pytest.fixture
def net() -> Net:
    return make()


@pytest.fixture
def source(net: Net) -> Iterator[EmulatedSource]:
    made = EmulatedSource(net)
    yield made
    made.detach()


def step(net: nn.Module, *inputs: torch.Tensor) -> None:
    for x in inputs:
        net(x).square().mean().backward()
    net.zero_grad()


def index(source: Source, name: str) -> int:
    return [column.name for column in source.columns()].index(name)


def value(source: Source, reading: Reading | None, key: str, name: str) -> float:
    assert reading is not None
    i = index(source, name)
    assert reading.valid[key][i], f"{key} of {name} is not valid"
    return float(reading.values[key][i])


def batch(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def test_columns_name_three_tensors_a_module_and_the_live_recipe(net: Net, source: EmulatedSource) -> None:
    columns = source.columns()
    assert [c.name for c in columns[:3]] == [f"blocks.0.0:{t}" for t in ("input", "weight", "grad_output")]
    assert {c.block for c in columns} == {"0", "1", "head"}
    assert [c.fp8_format for c in columns[:3]] == ["e4m3", "e4m3", "e5m2"]
    assert {(c.history_len, c.margin, c.amax_compute_algo) for c in columns} == {(4, 0.0, "max")}
    net.head.recipe.margin = 2.0  # type: ignore[union-attr]
    assert {c.margin for c in source.columns()} == {2.0}


def test_amax_is_the_step_s_maximum_and_scale_the_last_one_used(net: Net, source: EmulatedSource) -> None:
    step(net, batch(0))
    source.begin(with_statistics=False)
    inputs = [batch(1), batch(2, 50.0), batch(3)]
    step(net, *inputs[:2])
    in_force = net.blocks[0][0].scaling_forward.scale.clone()
    step(net, inputs[2])
    reading = source.read()
    assert reading is not None
    assert value(source, reading, "amax", "blocks.0.0:input") == float(inputs[1].abs().max())
    assert value(source, reading, "amax_last", "blocks.0.0:input") == float(inputs[2].abs().max())
    assert value(source, reading, "scale", "blocks.0.0:input") == float(in_force[0])
    assert (reading.updates_forward, reading.updates_backward) == (3, 3)
    assert "quantized" not in reading.values
    assert all(mask.all() for mask in reading.valid.values())


def test_each_step_starts_anew(net: Net, source: EmulatedSource) -> None:
    source.begin(with_statistics=True)
    assert source.read() is None
    step(net, batch(0, 100.0))
    source.begin(with_statistics=True)
    step(net, batch(1))
    reading = source.read()
    assert value(source, reading, "amax", "blocks.0.0:input") == float(batch(1).abs().max())
    assert value(source, reading, "quantized", "blocks.0.0:input") == 8 * 16


def test_counts_see_saturation_underflow_and_nonfinite(net: Net, source: EmulatedSource) -> None:
    step(net, batch(0))
    x = batch(0).clamp(-1, 1)
    layer = net.blocks[0][0].scaling_forward
    layer.scale[0] = 448.0
    x[0, :3] = torch.tensor([2.0, -3.0, 1.0])
    x[1, :2] = torch.tensor([1e-9, 0.0])
    x[2, 0] = torch.nan
    source.begin(with_statistics=True)
    step(net, x)
    reading = source.read()
    name = "blocks.0.0:input"
    counts = {k: value(source, reading, k, name) for k in ("quantized", "saturated", "underflowed", "nonfinite")}
    assert counts == {"quantized": 128, "saturated": 2, "underflowed": 1, "nonfinite": 1}
    assert value(source, reading, "snr", "blocks.0.0:weight") == pytest.approx(31.5, abs=3)
    assert value(source, reading, "mse", "blocks.0.0:weight") > 0


def test_modules_that_did_not_run_are_not_observed(net: Net, source: EmulatedSource) -> None:
    net.skip_second = True
    source.begin(with_statistics=True)
    step(net, batch(0))
    reading = source.read()
    assert reading is not None
    blocks = np.array([column.block for column in source.columns()])
    for key in ("amax", "amax_last", "scale", "high_precision", "quantized", "mse", "snr"):
        assert (reading.valid[key].numpy() == (blocks != "1")).all(), key


def test_a_layer_in_bf16_shows_amax_but_no_scale(net: Net, source: EmulatedSource) -> None:
    net.head.set_high_precision(True)  # type: ignore[operator]
    source.begin(with_statistics=True)
    step(net, batch(0))
    reading = source.read()
    assert value(source, reading, "amax", "head:input") > 0
    assert value(source, reading, "high_precision", "head:grad_output") == 1
    assert value(source, reading, "high_precision", "blocks.0.0:input") == 0
    assert reading is not None
    assert not reading.valid["scale"][index(source, "head:input")]
    assert not reading.valid["quantized"][index(source, "head:input")]


def test_evaluation_is_not_in_the_step(net: Net, source: EmulatedSource) -> None:
    source.begin(with_statistics=True)
    with torch.no_grad():
        net(batch(0))
    assert source.read() is None


def test_recomputation_is_counted_once() -> None:
    net = make()
    source = EmulatedSource(net)
    source.begin(with_statistics=True)
    x = torch.utils.checkpoint.checkpoint(net, batch(0).requires_grad_(), use_reentrant=False)
    x.sum().backward()
    reading = source.read()
    assert reading is not None
    assert value(source, reading, "quantized", "blocks.0.0:input") == 128
    assert (reading.updates_forward, reading.updates_backward) == (1, 1)
    source.detach()


def test_changes_of_the_model_after_attach_are_named(net: Net, source: EmulatedSource) -> None:
    assert source.not_observable() == []
    net.head = Fp8Linear(16, 16)
    net.blocks[1][2] = nn.Linear(32, 16)
    source.begin(with_statistics=True)
    step(net, batch(0))
    reading = source.read()
    assert reading is not None
    assert not reading.valid["amax"][index(source, "blocks.1.2:input")]
    assert value(source, reading, "amax", "blocks.0.0:input") > 0
    assert list(source.not_observable()) == [
        "blocks.1.2: no longer in the model",
        "head: no longer in the model",
        "head: converted after attach",
    ]
    assert len(source.columns()) == 15


def test_other_models_are_ignored(source: EmulatedSource) -> None:
    source.begin(with_statistics=True)
    step(make(), batch(0))
    assert source.read() is None


def test_watching_changes_no_bit_and_detach_leaves_nothing() -> None:
    results = []
    for watched in (False, True):
        net = make()
        source = EmulatedSource(net) if watched else None
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
        for i in range(4):
            if source is not None:
                source.begin(with_statistics=i % 2 == 0)
            net(batch(i, 4.0**i)).square().mean().backward()
            if source is not None:
                assert source.read() is not None
        if source is not None:
            source.detach()
            source.detach()
        assert not all_taps()
        assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()) == 2
        layers = [m for m in net.modules() if isinstance(m, Fp8Linear)]
        results.append([p.grad for p in net.parameters()] + [layer.scaling_backward.scale for layer in layers])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_reading_makes_no_python_number_of_a_tensor(
    net: Net, source: EmulatedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case: HOK-15
    def refuse(*args: object) -> None:
        raise AssertionError("a host synchronisation on an accelerator")

    source.begin(with_statistics=False)
    step(net, batch(0))
    monkeypatch.setattr(torch.Tensor, "item", refuse)
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    monkeypatch.setattr(torch.Tensor, "__bool__", refuse)
    monkeypatch.setattr(torch.Tensor, "__float__", refuse)
    source.begin(with_statistics=True)
    source.on_cast(net.head, 0, high_precision=False, statistics=None)  # type: ignore[arg-type]
    source.on_update([net.head], is_forward=True, amax=torch.ones(2), scale=torch.ones(2))  # type: ignore[list-item]
    assert source.read() is not None
