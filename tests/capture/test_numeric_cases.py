"""Numerical cases from real training: tiny amaxes, other formats, sizes that do not fit, evaluation, empty inputs."""

from __future__ import annotations

import itertools
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8watch.capture import sources
from fp8watch.capture.emulated import EmulatedSource
from fp8watch.capture.fp8_share import fp8_share
from fp8watch.capture.statistics import count
from fp8watch.capture.statistics.count import format_of
from fp8watch.capture.statistics.what_if import current_scale
from fp8watch.emulation import DelayedScaling, convert, fp8_modules
from fp8watch.formats import E4M3, FORMATS

ROOT = Path(__file__).parents[2]


def make(*sizes: int, **recipe: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
    convert(model, DelayedScaling(**{"amax_history_len": 4, **recipe}))
    return model


def batch(seed: int, width: int = 16, rows: int = 8, factor: float = 1.0) -> torch.Tensor:
    return factor * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def step(source: EmulatedSource, model: nn.Module, *inputs: torch.Tensor) -> dict[str, dict[str, float]]:
    source.begin(with_statistics=True)
    for x in inputs:
        model(x).square().sum().backward()
    reading = source.read()
    found: dict[str, dict[str, float]] = {}
    for name, values in ({} if reading is None else reading.values).items():
        rows = zip(source.columns(), values.tolist(), reading.validity(name).tolist(), strict=True)
        for column, value, ok in rows:
            if ok:
                found.setdefault(column.name, {})[name] = value
    return found


# case: NUM-25
def test_the_maximum_is_over_all_micro_batches_and_clipping_is_counted_from_the_data():  # case: NUM-06
    model = make(16, 16, amax_history_len=1, amax_compute_algo="most_recent")
    source = EmulatedSource(model)
    try:
        step(source, model, torch.full((8, 16), 2.0))  # the scale is made for an amax of 2
        micro_batches = [torch.full((8, 16), amax) for amax in (1.0, 50.0, 2.0, 3.0)]
        found = step(source, model, *micro_batches)["0:input"]
        state = model[0].scaling_forward
        assert state.scale[0].item() == pytest.approx(E4M3.max / 3.0)  # the library has kept the last one
        assert found["amax"] == 50.0
        assert found["amax_last"] == 3.0
        # Scale 224 at the second, 448 at the third, 8.96 at the fourth... every clipped element is counted.
        assert found["saturated"] == 8 * 16 * (1 + 0 + 0 + 1) == 256
        assert found["quantized"] == 4 * 8 * 16
    finally:
        source.detach()


@pytest.mark.parametrize("amax", [1e-45, 1e-39, 0.0, 1.0])
def test_a_tiny_amax_makes_no_infinite_scale(amax):  # case: NUM-07
    model = make(16, 16)
    source = EmulatedSource(model)
    try:
        for _ in range(2):
            found = step(source, model, torch.full((8, 16), amax))["0:input"]
        assert math.isfinite(found["scale"])
        assert found["amax"] == pytest.approx(amax, rel=0.5)
        assert found["saturated"] == 0  # dead, not overflowing
        scale = current_scale(torch.tensor(amax), E4M3)
        assert torch.isfinite(scale)
        counted = count(torch.full((4,), amax), scale, E4M3)
        assert counted.zeros == (4 if amax == 0 else 0)
        assert counted.nonfinite == 0
    finally:
        source.detach()


def test_the_maximum_is_that_of_the_dtype_at_hand():  # case: NUM-15
    x = torch.tensor([100.0, 239.0, 241.0, 300.0, 449.0, 6e4])
    over = {"e4m3": 2, "e4m3fnuz": 4, "e5m2": 1, "e5m2fnuz": 1}
    for name, fmt in FORMATS.items():
        dtype = getattr(torch, fmt.torch_dtype)
        assert format_of(dtype) is fmt
        assert torch.finfo(dtype).max == fmt.max
        found = count(x, torch.tensor(1.0), dtype)
        assert found.saturated == over[name] == (x > torch.finfo(dtype).max).sum()
    assert FORMATS["e4m3"].max / FORMATS["e4m3fnuz"].max == pytest.approx(1.8667, abs=1e-4)


def test_no_threshold_holds_the_maximum_of_a_format():  # case: NUM-15
    for part in ("detect", "policy", "controller", "capture", "actions"):
        for path in (ROOT / "fp8watch" / part).rglob("*.py"):
            code = re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text())
            assert not re.search(r"\b(448|57344|240)(\.0)?\b", code), path


def test_two_tensors_of_the_same_scales_differ_when_blocks_clip():  # case: NUM-17
    torch.manual_seed(0)
    blocks = torch.randn(1024, 32)
    scale = E4M3.max / blocks.abs().amax(1, keepdim=True)
    stale = blocks.clone()
    stale[:300] *= 8  # 30 % of the blocks have grown since their scales were made
    healthy, clipped = count(blocks, scale, E4M3), count(stale, scale, E4M3)
    assert healthy.saturated <= 1024  # the largest of a row at most, by the last bit of its scale
    assert clipped.saturated > 300 * 32 * 0.3
    assert clipped.snr < healthy.snr - 10


class Raising(nn.Linear):
    """A layer of a version that nobody has seen: its FP8 state raises."""

    @property
    def fp8_meta(self) -> dict[str, object]:
        raise RuntimeError("debug quantizer")


Raising.__module__ = "transformer_engine.pytorch.module.linear"


def test_a_module_that_raises_is_named_and_the_others_are_watched():  # case: NUM-18
    model = nn.Sequential(nn.Linear(16, 16), Raising(16, 16), nn.Linear(16, 16))
    convert(model)
    plain = batch(0)
    found = sources.find(model)
    try:
        assert [source.name for source in found.sources] == ["emulation"]
        assert found.unseen == ["1: RuntimeError: debug quantizer"]
        source = found.sources[0]
        assert isinstance(source, EmulatedSource)
        assert set(step(source, model, plain)) == {
            f"{i}:{t}" for i in (0, 2) for t in ("input", "weight", "grad_output")
        }
    finally:
        for source in found.sources:
            source.detach()


@pytest.mark.parametrize("is_fp8", [True, False])
def test_evaluation_of_torchao_layers_is_no_training_step(is_fp8):  # case: NUM-28
    models = pytest.importorskip("float8_models", reason="torchao is not installed")
    from fp8watch.capture.torchao.float8 import TorchaoSource

    model = models.blocks(num=1)
    source = TorchaoSource(model)
    try:
        source.begin(with_statistics=True)
        models.train(model, 0)
        before = {name: values.clone() for name, values in source.read().values.items()}
        source.begin(with_statistics=True)
        model.eval()
        with torch.no_grad():
            for layer in (model[0].up,):
                x = models.batch(9, 1e4)
                layer(x) if is_fp8 else nn.Linear.forward(layer, x)
        model.train()
        models.train(model, 0)
        after = source.read().values
        assert all(torch.equal(before[name], after[name]) for name in before)
    finally:
        source.detach()


def test_layers_that_do_not_fit_are_listed_with_their_sizes(caplog):  # case: NUM-22
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "odd": nn.Linear(712, 896), "one": nn.Linear(896, 1), "fit": nn.Linear(896, 4096),
            "kept": nn.Linear(64, 64),
        }
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        convert(
            model,
            filter=lambda name, linear: name != "kept" and linear.in_features % 16 + linear.out_features % 16 == 0,
        )
    names = [name for name, module in model.named_modules() if module in set(fp8_modules(model))]
    share = fp8_share(model, names)
    assert names == ["fit"]
    total = 712 * 896 + 896 + 896 * 4096 + 64 * 64
    assert share.parameters == pytest.approx(896 * 4096 / total)
    assert share.left_out == [
        "odd: 896 x 712, 712 not a multiple of 16",
        "one: 1 x 896, 1 not a multiple of 16",
        "kept: 64 x 64, not converted",
    ]
    assert fp8_share(nn.Sequential(nn.Conv2d(3, 4, 3)), []).parameters == 0.0
    tied = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    tied["b"].weight = tied["a"].weight
    assert fp8_share(tied, ["a"]).parameters == 1.0


def test_evaluation_in_high_precision_is_no_training_step():  # case: NUM-28
    watched, alone = make(16, 16), make(16, 16)
    source, other = EmulatedSource(watched), EmulatedSource(alone)
    try:
        for seed in range(5):
            found = step(source, watched, batch(seed))
            assert found == step(other, alone, batch(seed))
            if seed == 2:
                watched.eval()
                with torch.no_grad():
                    for i in range(3):  # FP8 off: the layer's plain forward
                        nn.Linear.forward(watched[0], batch(100 + i, factor=1e4).bfloat16().float())
                watched.train()
        assert source.not_observable() == []
        assert found["0:input"]["high_precision"] == 0
    finally:
        source.detach()
        other.detach()


@pytest.mark.parametrize("framework", ["emulated", "torchao"])
def test_an_expert_without_tokens_has_no_sample(framework):  # case: NUM-30
    if framework == "emulated":
        model: nn.Module = make(64, 64)
        source: Any = EmulatedSource(model)
        name = "0:input"
    else:
        models = pytest.importorskip("float8_models", reason="torchao is not installed")
        from fp8watch.capture.torchao.float8 import TorchaoSource

        model = models.blocks(num=1)
        source = TorchaoSource(model)
        name = "0.up:input"
    width = 64 if framework == "emulated" else 16
    try:
        seen = []
        for rows in (0, 5, 0):
            source.begin(with_statistics=True)
            source.look_closer(None)
            if framework == "torchao" and rows == 0:  # the library itself takes the maximum of nothing, watched or not
                with pytest.raises(RuntimeError, match="max"):
                    model(batch(1, width, rows=rows))
                seen.append(None)
                continue
            model(batch(1, width, rows=rows)).square().sum().backward()
            reading = source.read()
            columns = [column.name for column in source.columns()]
            row = columns.index(name)
            seen.append(int(reading.values["quantized"][row]) if reading.validity("quantized")[row] else None)
        assert seen == [None, 5 * width, None]
    finally:
        source.detach()
