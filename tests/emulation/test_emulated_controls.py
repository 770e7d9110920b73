"""Controls: what is asked is done in place, and read back from what ran."""

from __future__ import annotations

import io
import math

import pytest
import torch
from emulated_models import batch, histories, make_stack, scales

from fp8watch.capture.controls import Fp8Controls
from fp8watch.capture.emulated_controls import EmulatedControls
from fp8watch.errors import ActionError, CheckpointError


def train(model: torch.nn.Module, *seeds: int, scale: float = 1.0) -> None:
    for seed in seeds:
        model(batch(seed, scale)).square().mean().backward()
        model.zero_grad()


def test_precision_of_named_layers() -> None:
    model = make_stack()
    controls: Fp8Controls = EmulatedControls(model)
    names = controls.modules()
    assert "blocks.1.down" in names
    assert controls.ran_high_precision(["head"]) == [None]
    train(model, 0)
    controls.set_high_precision(["blocks.1.down", "head"], high_precision=True)
    assert controls.ran_high_precision(["first", "head"]) == [False, None]
    train(model, 1)
    assert controls.ran_high_precision(names) == [name in ("blocks.1.down", "head") for name in names]
    controls.set_high_precision(["head"], high_precision=False)
    train(model, 2)
    assert controls.ran_high_precision(["blocks.1.down", "head"]) == [True, False]


def test_repair_purges_one_tensor_and_leaves_the_others() -> None:
    model = make_stack(amax_history_len=64)
    controls = EmulatedControls(model)
    train(model, 0)
    poisoned = batch(1)
    poisoned[0, 0] = math.inf
    model(poisoned)
    train(model, 2, scale=8.0)
    state = model.first.scaling_forward
    assert float(state.scale[0]) == pytest.approx(448 / float(batch(0).abs().max()))  # stands still
    before = controls.scales(["first:weight", "head:grad_output"])
    repaired = controls.repair_scales(["first:input"])
    assert repaired == {"first:input": pytest.approx(448 / (8 * float(batch(2).abs().max())))}
    assert controls.scales(["first:weight", "head:grad_output"]) == before
    assert state.amax_history.isfinite().all()
    train(model, 3, scale=16.0)
    assert controls.scales(["first:input"])["first:input"] < repaired["first:input"]


def test_repair_sets_scales_that_a_broken_update_left_wrong() -> None:
    model = make_stack()
    controls = EmulatedControls(model)
    train(model, 0, 1)
    state = model.head.scaling_backward
    right = float(state.scale[0])
    state.update = lambda recipe, amax: None  # type: ignore[method-assign]
    state.scale.mul_(2.0**-24)
    train(model, 1)
    assert controls.scales(["head:grad_output"])["head:grad_output"] == pytest.approx(right * 2.0**-24)
    assert controls.repair_scales(["head:grad_output"])["head:grad_output"] == pytest.approx(right, rel=0.5)


def test_margin_of_the_live_recipe() -> None:
    model = make_stack()
    controls = EmulatedControls(model)
    train(model, 0)
    names = ["first:input", "first:weight", "head:weight"]
    before = controls.scales(names)
    controls.set_margin(3.0)
    assert controls.margin() == 3.0
    train(model, 0)
    assert controls.scales(names) == {name: scale / 8 for name, scale in before.items()}
    with pytest.raises(ActionError):
        controls.set_margin(math.nan)


def test_state_survives_a_file_and_is_restored_in_place() -> None:
    model = make_stack()
    controls = EmulatedControls(model)
    train(model, 0, 1)
    file = io.BytesIO()
    torch.save(controls.state_dict(), file)
    expected = histories(model), scales(model, forward=True), scales(model, forward=False)
    scale = model.head.scaling_forward.scale
    train(model, 2, 3, scale=100.0)
    file.seek(0)
    controls.load_state_dict(torch.load(file, weights_only=True))
    for a, b in zip(
        expected, (histories(model), scales(model, forward=True), scales(model, forward=False)), strict=True
    ):
        assert torch.equal(a, b)
    assert model.head.scaling_forward.scale is scale


def test_state_that_does_not_fit_changes_nothing() -> None:
    model = make_stack()
    controls = EmulatedControls(model)
    train(model, 0)
    saved = controls.state_dict()
    train(model, 1)
    before = histories(model)
    for damage in ({**saved, "head": {}}, {k: v for k, v in saved.items() if k != "head"}):
        with pytest.raises(CheckpointError, match="head"):
            controls.load_state_dict(damage)
    with pytest.raises(CheckpointError, match="amax_history"):
        controls.load_state_dict(EmulatedControls(make_stack(amax_history_len=5)).state_dict())
    assert torch.equal(histories(model), before)


def test_unknown_names_change_nothing() -> None:
    model = make_stack()
    controls = EmulatedControls(model)
    with pytest.raises(ActionError, match="nowhere"):
        controls.set_high_precision(["head", "nowhere"], high_precision=True)
    assert not model.head.is_high_precision
    for name in ("head", "head:output", "nowhere:input"):
        with pytest.raises(ActionError, match=name):
            controls.repair_scales([name])
