from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from fp8watch.capture import sources
from fp8watch.emulation import convert


def test_emulated_layers_are_read_and_can_be_changed():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    convert(model)
    found = sources.find(model)
    (source,) = found.sources
    try:
        assert found.framework == "emulation"
        assert len(source.columns()) == 6
        assert found.controls is not None
        assert list(found.controls.modules()) == ["0", "1"]
        assert found.unseen == []
    finally:
        source.detach()


def test_plain_model_has_nothing_to_read():
    found = sources.find(nn.Linear(16, 16))
    assert (found.sources, found.controls, found.unseen, found.framework) == ([], None, [], "")


def test_layers_of_a_framework_that_is_not_read_are_named():
    float8 = type("Float8Linear", (nn.Linear,), {"__module__": "torchao.float8.float8_linear"})
    model = nn.ModuleDict({"up": float8(4, 4), "norm": nn.LayerNorm(4), "down": float8(4, 4)})
    found = sources.find(model)
    assert [reason.split(":")[0] for reason in found.unseen] == ["up", "down"]


def test_unknown_version_of_a_framework_is_named_with_the_error(monkeypatch):
    te = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    layer = te(4, 4)
    layer.fp8_meta = {}
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    found = sources.find(nn.Sequential(layer))
    assert found.sources == []
    assert found.unseen[0].startswith("0: Transformer Engine: ")


def test_layers_derived_from_a_framework_elsewhere_are_its_layers(monkeypatch):
    """As Megatron derives its `TELinear`."""
    te = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    layer = type("TELinear", (te,), {"__module__": "megatron.core.extensions.transformer_engine"})(4, 4)
    layer.fp8_meta = {}
    ao = type("MXFP8Linear", (nn.Linear,), {"__module__": "torchao.prototype.mx"})
    mine = type("Mine", (ao,), {"__module__": "my.layers"})(4, 4)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    found = sources.find(nn.Sequential(layer, mine))
    assert [entry.partition(":")[0] for entry in found.unseen] == ["0", "1"]
    assert found.unseen[0].startswith("0: Transformer Engine: ")
    assert "prototype" in found.unseen[1]


def test_te_operations_that_quantize_are_transformer_engine(monkeypatch):
    home = {"__module__": "transformer_engine.pytorch.ops.basic.basic_linear"}
    linear = type("BasicLinear", (nn.Linear,), {**home, "num_quantizers": lambda self, mode: 2})
    bias = type("Bias", (nn.Linear,), {**home, "num_quantizers": lambda self, mode: 0})
    odd = type("Odd", (nn.Linear,), home)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    found = sources.find(nn.Sequential(linear(2, 2), bias(2, 2), odd(2, 2)))
    assert [reason.split(":")[:2] for reason in found.unseen] == [["0", " Transformer Engine"]]


@pytest.mark.parametrize("framework", ["transformer_engine", "torchao"])
def test_nothing_is_imported_that_the_model_does_not_use(framework):
    loaded = {name for name in sys.modules if name.startswith(framework)}
    sources.find(torch.nn.Linear(2, 2))
    assert {name for name in sys.modules if name.startswith(framework)} == loaded
