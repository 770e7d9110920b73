"""Transformer Engine's current and block scaling on a GPU with the real library.

python -m pytest tests/gpu/test_gpu_te_stateless.py -m gpu
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402

from fp8watch.capture.te.controls import TeControls  # noqa: E402
from fp8watch.capture.te.gemm_tap import gemm_tap  # noqa: E402
from fp8watch.capture.te.source import TeSource  # noqa: E402

NAMES = [
    f"{module}:{tensor}"
    for module in ("0", "1.fc1", "1.fc2", "2")
    for tensor in ("input", "weight", "grad_output")
]  # fmt: skip
RECIPES = {"current": Float8CurrentScaling, "block": Float8BlockScaling}


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "bias": False}
    return torch.nn.Sequential(
        te.Linear(256, 512, **options), te.LayerNormMLP(512, 1024, **options), te.Linear(512, 256, **options)
    ).cuda()


def run(model: torch.nn.Module, recipe: Any, seed: int, factor: float = 1.0) -> torch.Tensor:
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(seed))
    x = x * factor
    with te.autocast(enabled=True, recipe=recipe):
        output = model(x)
    output.float().square().mean().backward()
    return x


def columns(source: TeSource, reading: Any, key: str = "amax") -> dict[str, float]:
    rows = zip(source.columns(), reading.values[key].tolist(), reading.valid[key].tolist(), strict=True)
    return {column.name: value for column, value, ok in rows if ok}


@pytest.mark.parametrize("kind", ["current", "block"])
def test_every_operand_has_its_amax_and_scale(kind: str) -> None:
    model, recipe = make(), RECIPES[kind]()
    source = TeSource(model)
    gradients: dict[str, float] = {}
    model[2].register_full_backward_hook(lambda m, gi, go: gradients.update({"2": go[0].abs().max().item()}))
    try:
        for seed in range(3):  # seen from the second step on
            source.begin(with_statistics=False)
            x = run(model, recipe, seed)
            reading = source.read()
        assert reading is not None
        amax, scale = columns(source, reading), columns(source, reading, "scale")
        assert list(amax) == NAMES
        assert {column.recipe for column in source.columns()} == {kind}
        assert source.not_observable() == []
        truth = {
            "0:input": x.abs().max().item(),
            "0:weight": model[0].weight.abs().max().item(),
            "1.fc1:weight": model[1].fc1_weight.abs().max().item(),
            "2:weight": model[2].weight.abs().max().item(),
            "2:grad_output": gradients["2"],
        }
        for name, value in truth.items():
            # Power-of-two block scales give an upper bound to a factor of two.
            low, high = (0.999, 1.001) if kind == "current" else (0.999, 2.001)
            assert low <= amax[name] / value <= high, name
        for column in source.columns():
            fp8_max = 57344.0 if column.fp8_format == "e5m2" else 448.0
            assert scale[column.name] * amax[column.name] == pytest.approx(fp8_max, rel=1e-4)
        assert gemm_tap.num_unmatched == 0
        assert gemm_tap.num_failures == 0
    finally:
        source.detach()


@pytest.mark.parametrize("kind", ["current", "block"])
def test_nothing_changes_and_nothing_waits(kind: str) -> None:
    bare, model, recipe = make(), make(), RECIPES[kind]()
    source = TeSource(model)
    try:
        for seed in range(4):
            source.begin(with_statistics=False)
            run(model, recipe, seed)
            source.read()
            run(bare, recipe, seed)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        source.begin(with_statistics=False)
        run(model, recipe, 9)
        assert source.read() is not None
        torch.cuda.set_sync_debug_mode("default")
        run(bare, recipe, 9)
        for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        source.detach()


def test_delayed_scaling_alone_never_pays_for_the_tap() -> None:
    model = make()
    source = TeSource(model)
    try:
        for seed in range(6):
            source.begin(with_statistics=False)
            run(model, DelayedScaling(amax_history_len=4), seed)
            assert source.read() is not None
        assert {column.recipe for column in source.columns()} == {"delayed"}
        assert not gemm_tap._patches
    finally:
        source.detach()


def test_recipe_changed_in_a_live_run_is_followed() -> None:
    model = make()
    source = TeSource(model)
    try:
        delayed, current = DelayedScaling(amax_history_len=4), Float8CurrentScaling()
        for seed in range(3):
            source.begin(with_statistics=False)
            run(model, delayed, seed)
            source.read()
        for seed in range(64):
            source.begin(with_statistics=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # TE says that the recipe type changed
                run(model, current, seed)
            reading = source.read()
        kinds = {column.recipe for column in source.columns()}
        assert "current" in kinds
        assert set(columns(source, reading)) >= set(NAMES)
    finally:
        source.detach()


def test_layer_goes_to_bf16_and_back() -> None:
    model, recipe = make(), Float8CurrentScaling()
    source, controls = TeSource(model), TeControls(model)
    try:
        for seed in range(3):
            source.begin(with_statistics=False)
            run(model, recipe, seed)
            source.read()
        controls.set_high_precision(["0"], high_precision=True)
        source.begin(with_statistics=False)
        run(model, recipe, 4)
        assert not [name for name in columns(source, source.read()) if name.startswith("0:")]
        assert controls.ran_high_precision(["0", "2"]) == [True, False]
        controls.set_high_precision(["0"], high_precision=False)
        source.begin(with_statistics=False)
        run(model, recipe, 5)
        assert list(columns(source, source.read())) == NAMES
        assert controls.ran_high_precision(["0"]) == [False]
    finally:
        source.detach()
