from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torchao", reason="torchao is not installed")

from float8_models import RECIPES, batch, blocks, expected, train
from torchao.float8 import float8_linear, float8_scaling_utils, float8_utils

from fp8watch.capture import sources
from fp8watch.capture.source import Reading
from fp8watch.capture.torchao.float8 import TorchaoSource
from fp8watch.capture.torchao.taps import taps
from fp8watch.formats import FORMATS


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    before = (float8_scaling_utils.hp_tensor_and_scale_to_float8, float8_utils.amax_to_scale)
    forward = float8_linear.Float8Linear.forward
    yield
    assert (float8_scaling_utils.hp_tensor_and_scale_to_float8, float8_utils.amax_to_scale) == before
    assert float8_linear.Float8Linear.forward is forward


def by_name(source: TorchaoSource, reading: Reading | None, key: str) -> dict[str, float]:
    assert reading is not None
    columns = source.columns()
    assert len(columns) == len(reading.values[key])
    valid = reading.valid[key].tolist()
    return {
        column.name: value for column, value, ok in zip(columns, reading.values[key].tolist(), valid, strict=True) if ok
    }


def step(source: TorchaoSource, run: nn.Module, seed: int = 0, *, statistics: bool = False) -> Reading | None:
    source.begin(with_statistics=statistics)
    train(run, seed)
    return source.read()


@pytest.mark.parametrize("recipe", RECIPES)
def test_amax_and_scale_are_those_of_each_cast(recipe):
    model = blocks(recipe)
    source = TorchaoSource(model)
    try:
        reading = step(source, model, 3)
        amax, scale = by_name(source, reading, "amax"), by_name(source, reading, "scale")
        truth = expected(blocks(recipe), [3], [1.0])
        assert len(truth) == 18
        assert amax == {name: values[0] for name, values in truth.items()}
        formats = {column.name: FORMATS[column.fp8_format] for column in source.columns()}
        for name, value in scale.items():
            ideal = formats[name].max / truth[name][0]
            if recipe != "tensorwise":
                ideal = 2.0 ** math.floor(math.log2(ideal))
            assert value == pytest.approx(ideal, rel=1e-6)
        assert scale.keys() == truth.keys()
        backward = {fmt.name for name, fmt in formats.items() if name.endswith("grad_output")}
        assert backward == ({"e5m2"} if recipe == "tensorwise" else {"e4m3"})
        assert {(column.source, column.recipe) for column in source.columns()} == {("tapped", "current")}
        assert source.not_observable() == []
    finally:
        source.detach()


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_give_the_largest_and_the_last(recipe):
    model = blocks(recipe)
    source = TorchaoSource(model)
    try:
        for _ in range(2):  # the second step knows nothing of the first
            source.begin(with_statistics=False)
            model.zero_grad()
            for seed, factor in ((1, 1.0), (2, 8.0), (3, 0.25)):
                train(model, seed, factor)
            reading = source.read()
        truth = expected(blocks(recipe), [1, 2, 3], [1.0, 8.0, 0.25])
        assert by_name(source, reading, "amax") == {name: max(values) for name, values in truth.items()}
        assert by_name(source, reading, "amax_last") == {name: values[-1] for name, values in truth.items()}
        assert (reading.updates_forward, reading.updates_backward) == (3, 3)
    finally:
        source.detach()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_nothing(reentrant):  # case: HOK-06
    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Sequential) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for block in self.inner:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    readings = []
    for wrap in (lambda model: model, Recomputed):
        model = blocks("rowwise")
        source = TorchaoSource(model)
        try:
            readings.append(step(source, wrap(model), 5, statistics=True))
        finally:
            source.detach()
    plain, recomputed = readings
    assert plain.values.keys() == recomputed.values.keys()
    for key in ("amax", "amax_last", "scale", "quantized", "saturated", "underflowed", "nonfinite"):
        assert torch.equal(plain.values[key], recomputed.values[key]), key
    assert plain.values["quantized"].min() > 0
    assert (recomputed.updates_forward, recomputed.updates_backward) == (1, 1)


def test_evaluation_is_no_step():
    model = blocks()
    source = TorchaoSource(model)
    try:
        source.begin(with_statistics=True)
        with torch.no_grad():
            model(batch(0, 1000.0))
        assert source.read() is None
        reading = step(source, model, 1)
        source.begin(with_statistics=False)
        train(model, 1)
        with torch.no_grad():
            model(batch(0, 1000.0))
        assert torch.equal(source.read().values["amax"], reading.values["amax"])
    finally:
        source.detach()


def test_layer_never_called_is_named_and_has_no_column():  # case: HOK-01
    model = blocks()

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[1](self.inner[0](x))

    run = Half()
    source = TorchaoSource(run)
    try:
        reading = step(source, run)
        assert {column.module for column in source.columns()} == {
            "inner.0.up", "inner.0.down", "inner.1.up", "inner.1.down",
        }  # fmt: skip
        assert len(reading.values["amax"]) == 12
        missing = source.not_observable()
        assert [entry.split(":")[0] for entry in missing] == ["inner.2.up", "inner.2.down"]
        assert all("has not run in training since attach" in entry for entry in missing)
        source.begin(with_statistics=False)
        train(model, 0)  # now all of them
        reading = source.read()
        assert len(reading.values["amax"]) == len(source.columns()) == 18
        assert source.not_observable() == []
        source.begin(with_statistics=False)
        train(run, 0)  # known, but not in this step: no number either
        assert not source.read().valid["amax"][12:].any()
    finally:
        source.detach()


def test_layers_that_come_and_go_are_named():
    model = blocks()
    source = TorchaoSource(model)
    try:
        model[1] = blocks(num=1, seed=1)[0]
        step(source, model)
        reasons = source.not_observable()
        assert [r for r in reasons if "no longer in the model" in r] == [
            f"1.{part}: no longer in the model" for part in ("up", "down")
        ]
        assert len([r for r in reasons if "converted after attach" in r]) == 2
    finally:
        source.detach()


def test_layers_that_cannot_be_told_apart_are_named_not_mixed_up():
    model = blocks(num=1)
    model[0].up.linear_mm_config = model[0].down.linear_mm_config
    source = TorchaoSource(model)
    try:
        assert step(source, model) is None
        assert [entry.split(": ")[1] for entry in source.not_observable()] == [
            "shares its linear_mm_config with another layer"
        ] * 2
    finally:
        source.detach()


def test_copies_of_a_model_are_somebody_elses():
    import copy

    model = blocks()
    average = copy.deepcopy(model)
    source = TorchaoSource(model)
    try:
        reading = step(source, model, 1)
        source.begin(with_statistics=False)
        train(model, 1)
        train(average, 0, 100.0)
        assert torch.equal(source.read().values["amax"], reading.values["amax"])
    finally:
        source.detach()


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_detached_in_either_order(first):
    models = [blocks(seed=1), blocks(seed=2)]
    watching = [TorchaoSource(model) for model in models]
    alone = []
    for model in (blocks(seed=1), blocks(seed=2)):
        source = TorchaoSource(model)
        alone.append(step(source, model, 7).values["amax"])
        source.detach()
    for source in watching:
        source.begin(with_statistics=False)
    for model in models:
        train(model, 7)
    for source, amax in zip(watching, alone, strict=True):
        assert torch.equal(source.read().values["amax"], amax)
    watching[first].detach()
    assert taps.is_installed
    other = watching[1 - first]
    other.begin(with_statistics=False)
    train(models[1 - first], 8)
    assert other.read() is not None
    other.detach()
    assert not taps.is_installed


def test_somebody_elses_patch_on_top_survives(monkeypatch):
    model = blocks()
    source = TorchaoSource(model)
    ours = float8_scaling_utils.hp_tensor_and_scale_to_float8
    calls = []

    def theirs(*args, **options):
        calls.append(1)
        return ours(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(float8_scaling_utils, "hp_tensor_and_scale_to_float8", theirs)
        source.detach()
        assert float8_scaling_utils.hp_tensor_and_scale_to_float8 is theirs
        train(model, 0)
        assert calls
        again = TorchaoSource(model)  # ours is still underneath, and is used
        assert step(again, model) is not None
        again.begin(with_statistics=False)
        train(model, 0)
        assert again.read().updates_forward == 1
    again.detach()


def test_tap_that_raises_is_dropped_and_training_goes_on(caplog):  # case: NUM-18
    class Broken(TorchaoSource):
        def on_cast(self, *args, **options):
            raise RuntimeError("no")

    bare = train(blocks(), 4)
    model = blocks()
    source, healthy = Broken(model), TorchaoSource(model)
    failures = taps.num_failures
    try:
        assert torch.equal(train(model, 4), bare)
        assert taps.num_failures == failures + 1
        assert caplog.text.count("is switched off") == 1
        assert source.read() is None
        assert healthy.read() is not None
    finally:
        source.detach()
        healthy.detach()


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_bit_identical(recipe):
    results = []
    for watched in (False, True):
        model = blocks(recipe)
        source = TorchaoSource(model) if watched else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for seed in range(3):
            if source is not None:
                source.begin(with_statistics=seed == 1)
            optimizer.zero_grad()
            train(model, seed)
            optimizer.step()
            if source is not None:
                assert source.read() is not None
        if source is not None:
            source.detach()
        results.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_no_tensor_of_the_users_outlives_its_step():
    model = blocks()
    source = TorchaoSource(model)
    kept = []
    hook = model[1].up.register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))
    try:
        step(source, model, statistics=True)
        hook.remove()
        gc.collect()
        assert [ref() for ref in kept] == [None]
    finally:
        source.detach()


@pytest.mark.parametrize(("value", "amax"), [(float("inf"), float("inf")), (float("nan"), float("nan"))])
def test_nonfinite_values_show_in_amax_and_in_the_count(value, amax):
    model = blocks("rowwise", num=1)
    source = TorchaoSource(model)
    try:
        source.begin(with_statistics=True)
        x = batch(0)
        x[2, 3] = value
        model[0].up(x).sum().backward()
        reading = source.read()
        assert by_name(source, reading, "amax")["0.up:input"] == pytest.approx(amax, nan_ok=True)
        assert by_name(source, reading, "nonfinite")["0.up:input"] == 1
    finally:
        source.detach()


@pytest.mark.parametrize("recipe", RECIPES)
def test_element_counts_are_those_of_the_real_cast(recipe):
    model = blocks(recipe, num=1)
    source = TorchaoSource(model)
    x = batch(1)
    x[0, 0] = 0.0
    x[:, 1] *= 2.0**-21  # lost beside the others
    try:
        source.begin(with_statistics=True)
        model(x).sum().backward()
        reading = source.read()
        scale = by_name(source, reading, "scale")["0.up:input"]
        per_row = torch.finfo(torch.float8_e4m3fn).max / x.abs().amax(1, keepdim=True)
        factor = torch.exp2(torch.floor(torch.log2(per_row))) if recipe != "tensorwise" else torch.tensor(scale)
        codes = (x * factor).to(torch.float8_e4m3fn).float()
        lost = ((codes == 0) & (x != 0)).sum().item()
        assert lost > 0
        counts = {name: by_name(source, reading, name)["0.up:input"] for name in ("quantized", "underflowed")}
        assert counts == {"quantized": x.numel(), "underflowed": lost}
        mse = (codes / factor - x).square().mean().item()
        assert by_name(source, reading, "mse")["0.up:input"] == pytest.approx(mse, rel=1e-4)
    finally:
        source.detach()


def test_long_accumulation_is_folded_on_the_way(monkeypatch):
    monkeypatch.setattr("fp8watch.capture.cast_log.FOLD_AT", 50)
    model = blocks()
    source = TorchaoSource(model)
    try:
        source.begin(with_statistics=False)
        seeds, factors = list(range(6)), [1.0, 5.0, 1.0, 0.5, 3.0, 1.0]
        for seed, factor in zip(seeds, factors, strict=True):
            train(model, seed, factor)
        truth = expected(blocks(), seeds, factors)
        reading = source.read()
        assert by_name(source, reading, "amax") == {name: max(values) for name, values in truth.items()}
        assert by_name(source, reading, "amax_last") == {name: values[-1] for name, values in truth.items()}
    finally:
        source.detach()


def test_framework_is_found():
    model = blocks()
    found = sources.find(model)
    try:
        assert found.framework == "torchao"
        assert found.unseen == []
        assert len(list(found.controls.modules())) == 6
        assert step(found.sources[0], model) is not None
    finally:
        found.sources[0].detach()
