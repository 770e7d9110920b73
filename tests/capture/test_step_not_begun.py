"""A step that could not begin, or was never begun: nothing of another step is handed out as its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_emulated_source import make, step
from test_te_statistics import Extension, Linear, counts, two_layers

from fp8watch.capture.emulated import EmulatedSource
from fp8watch.capture.te.source import TeSource
from fp8watch.capture.te.statistics import TeStatistics


@pytest.fixture
def parts():
    yield from two_layers(4.0)


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA error")


@pytest.mark.parametrize("fails", ["what-if", "rows", "tap"])
def test_counts_of_the_last_step_are_not_handed_out_again_whatever_fails(parts, monkeypatch, fails):
    model, extension, statistics = parts
    quantizer = model["a"].quantizers["scaling_fwd"][0]
    statistics.begin(is_sampled=True)
    statistics.look_closer(None)
    extension.quantize(torch.ones(2, 8), quantizer)
    assert counts(statistics)["a:input"]["quantized"] == 16
    with monkeypatch.context() as patch:
        holder, name = {
            "what-if": (statistics._what_if, "begin"), "rows": (statistics.rows, "clear"),
            "tap": (statistics._tap, "listen"),
        }[fails]  # fmt: skip
        patch.setattr(holder, name, fail)
        with pytest.raises(RuntimeError, match="CUDA"):
            statistics.begin(is_sampled=True)
        assert counts(statistics) == {}
        statistics.begin(is_sampled=False)
        assert counts(statistics) == {}
    statistics.begin(is_sampled=True)
    extension.quantize(torch.ones(2, 8), quantizer)
    assert counts(statistics)["a:input"]["quantized"] == 16


def put_fails_once(statistics: TeStatistics, after: int) -> None:
    """`after`: patches that are in by then."""
    patches = statistics._tap._patches
    put = patches.put

    def fails(places: Any) -> None:
        patches.put = put  # type: ignore[method-assign]
        put(places[:after])
        raise AttributeError("gone for a moment")

    patches.put = fails  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [0, 1])
def test_a_patch_that_cannot_be_put_in_costs_one_sampled_step(parts, after):
    model, extension, statistics = parts
    bare, quantizer = extension.quantize, model["a"].quantizers["scaling_fwd"][0]
    put_fails_once(statistics, after)
    with pytest.raises(AttributeError, match="moment"):
        statistics.begin(is_sampled=True)
    assert extension.quantize == bare
    statistics.begin(is_sampled=True)
    extension.quantize(torch.ones(2, 8), quantizer)
    extension.gelu(torch.ones(2, 8), quantizer)
    assert counts(statistics)["a:input"]["quantized"] == 32


@pytest.fixture
def watched():
    """A layer with delayed scaling, its step with a given amax, and a source that counts every second step."""
    model, extension = torch.nn.ModuleDict({"a": Linear(1.0)}), Extension()
    extension.fused_amax_and_scale_update_after_reduction = lambda *args: None
    module = model["a"]
    module.fp8_meta["recipe"] = SimpleNamespace(margin=0, amax_compute_algo="max", fp8_format="Format.HYBRID")
    module.fp8 = True
    nobody = SimpleNamespace(subscribe=lambda *args: None, unsubscribe=lambda *args: None, num_unmatched=0)
    source = TeSource(model, extension=extension, tap=nobody)  # type: ignore[arg-type]
    source._statistics._kernel = None

    def run(amax: float = 1.0) -> Any:
        extension.quantize(torch.ones(2, 8), module.quantizers["scaling_fwd"][0])
        for key, num in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            scale = module.fp8_meta[key].scale
            extension.fused_amax_and_scale_update_after_reduction(torch.full((num,), amax), None, [scale])
        return source.read()

    yield source, run
    source.detach()


def test_later_sampled_steps_are_counted_after_one_that_could_not_begin(watched):
    source, run = watched
    found = []
    for number in range(1, 17):
        if number == 5:
            put_fails_once(source._statistics, 0)
        try:
            source.begin(with_statistics=number % 2 == 1)
        except AttributeError:
            assert number == 5
        reading = run()
        if number % 2:
            found.append("quantized" in reading.values)
    assert found == [True, True, False, True, True, True, True, True]


def test_amax_of_a_step_that_could_not_begin_counting_is_its_own(watched, monkeypatch):
    source, run = watched
    source.begin(with_statistics=True)
    assert run(8.0).values["amax"].max() == 8.0
    monkeypatch.setattr(source._statistics, "begin", fail)
    with pytest.raises(RuntimeError):
        source.begin(with_statistics=True)
    assert run(2.0).values["amax"].max() == 2.0


def test_amax_never_runs_on_while_transformer_engine_is_not_begun(watched):
    source, run = watched
    source.begin(with_statistics=True)
    seen = [run(amax) for amax in (8.0, 4.0, 2.0, 1.0)]
    assert [None if r is None else r.values["amax"].max().item() for r in seen] == [8.0, None, None, None]
    assert "quantized" in seen[0].values
    source.begin(with_statistics=True)
    assert run(0.5).values["amax"].max() == 0.5


def test_amax_never_runs_on_while_an_emulated_model_is_not_begun():
    net = make()
    source = EmulatedSource(net)
    try:
        source.begin(with_statistics=True)
        seen = []
        for factor in (100.0, 10.0, 1.0):
            step(net, torch.full((2, 16), factor))
            reading = source.read()
            seen.append(None if reading is None else reading.values["amax"][0].item())
        assert seen == [100.0, None, None]
    finally:
        source.detach()


def test_amax_never_runs_on_while_a_torchao_model_is_not_begun():
    pytest.importorskip("torchao", reason="torchao is not installed")
    from float8_models import batch, blocks

    from fp8watch.capture.torchao.float8 import TorchaoSource

    model = blocks()
    source = TorchaoSource(model)
    try:
        seen = []
        for factor in (100.0, 10.0, 1.0):
            model(batch(0, factor)).sum().backward()
            reading = source.read()
            seen.append(None if reading is None else reading.values["amax"][0].item())
        assert seen == [pytest.approx(100 * batch(0).abs().max().item(), rel=0.01), None, None]
    finally:
        source.detach()
