from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torchao", reason="torchao is not installed")

from float8_models import batch, blocks, train

from fp8watch.capture.torchao.controls import TorchaoControls
from fp8watch.capture.torchao.float8 import TorchaoSource
from fp8watch.errors import ActionError


def test_layer_in_high_precision_computes_in_bf16():
    model = blocks()
    layer = model[0].up
    controls = TorchaoControls(model)
    x = batch(1).requires_grad_()
    in_fp8 = layer(x)
    controls.set_high_precision(["0.up"], high_precision=True)
    output = layer(x)
    truth = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    assert torch.equal(output, truth.float())
    assert not torch.equal(output, in_fp8)
    exact = F.linear(x, layer.weight, layer.bias)
    assert (output - exact).norm() < (in_fp8 - exact).norm() / 4
    output.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.allclose(x.grad, layer.weight.sum(0).expand_as(x), rtol=0.05, atol=0.05)
    controls.set_high_precision(["0.up"], high_precision=False)
    assert torch.equal(layer(x), in_fp8)


def test_autocast_decides_the_dtype():
    model = blocks()
    controls = TorchaoControls(model)
    controls.set_high_precision(["0.up"], high_precision=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model[0].up(batch(1)).dtype == torch.bfloat16
    assert model[0].up(batch(1)).dtype == torch.float32


def test_read_back_says_what_ran_not_what_was_asked():
    model = blocks()
    controls = TorchaoControls(model)
    controls.set_high_precision(["0.up", "1.down"], high_precision=True)
    assert controls.ran_high_precision(["0.up", "1.down"]) == [None, None]
    model[0](batch(1))
    assert controls.ran_high_precision(["0.up", "1.down"]) == [True, None]
    controls.set_high_precision(["0.up"], high_precision=False)
    assert controls.ran_high_precision(["0.up"]) == [None]
    model[0](batch(1))
    assert controls.ran_high_precision(["0.up"]) == [False]
    controls.set_high_precision(["0.up"], high_precision=False)  # again: nothing to do
    assert controls.ran_high_precision(["0.up"]) == [False]
    assert not model[0].up._forward_hooks


def test_amax_is_measured_meanwhile_and_no_scale_is_claimed():
    model = blocks()
    source, controls = TorchaoSource(model), TorchaoControls(model)
    try:
        source.begin(with_statistics=False)
        train(model, 1)
        fp8 = source.read()
        controls.set_high_precision(["0.up"], high_precision=True)
        source.begin(with_statistics=False)
        train(model, 1)
        reading = source.read()
        assert reading.values["high_precision"].tolist() == [1, 1, 1] + [0] * 15
        assert reading.valid["amax"].all()
        assert reading.valid["scale"].tolist() == [False] * 3 + [True] * 15
        assert torch.equal(reading.values["amax"][:2], fp8.values["amax"][:2])
        assert torch.allclose(reading.values["amax"][2], fp8.values["amax"][2], rtol=0.2)
        assert reading.updates_backward == 1
        amax = reading.values["amax"].clone()
        source.begin(with_statistics=False)
        train(model, 1)
        with torch.no_grad():
            model(batch(1, 1000.0))
        assert torch.equal(source.read().values["amax"], amax)
    finally:
        source.detach()


@pytest.mark.parametrize("is_back", [False, True])
def test_model_in_high_precision_can_be_copied_and_pickled(is_back):  # case: HOK-09
    model = blocks()
    controls = TorchaoControls(model)
    controls.set_high_precision(["0.up"], high_precision=True)
    if is_back:  # a hook waits for the first FP8 forward
        controls.set_high_precision(["0.up"], high_precision=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(other, 1)
        assert controls.ran_high_precision(["0.up"]) == [None]  # the copy's forward is not taken for the model's
        assert torch.equal(other[0].up.weight, model[0].up.weight)
    train(model, 1)
    assert controls.ran_high_precision(["0.up"]) == [not is_back]
    assert list(model.state_dict()) == list(blocks().state_dict())


def test_scales_and_margin_are_refused_with_the_reason():
    controls = TorchaoControls(blocks())
    for call in (controls.repair_scales, controls.scales):
        with pytest.raises(ActionError, match="keeps none"):
            call(["0.up:input"])
    with pytest.raises(ActionError, match="no margin"):
        controls.set_margin(1.0)
    assert controls.margin() is None
    assert controls.state_dict() == {}
    controls.load_state_dict({})


def test_unknown_layers_and_fp8_weights_are_refused():
    model = blocks()
    controls = TorchaoControls(model)
    with pytest.raises(ActionError, match="nowhere"):
        controls.set_high_precision(["0.up", "nowhere"], high_precision=True)
    assert "forward" not in vars(model[0].up)
    layer = model[0].up
    object.__setattr__(layer.config, "enable_fsdp_float8_all_gather", True)
    try:
        with pytest.raises(ActionError, match="gathered in FP8"):
            controls.set_high_precision(["0.up"], high_precision=True)
    finally:
        object.__setattr__(layer.config, "enable_fsdp_float8_all_gather", False)
