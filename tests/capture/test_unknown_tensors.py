"""Quantized tensors of an unknown library: not inspected, reported as not observable, and no harm to training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8watch.capture import shadow_gemm
from fp8watch.capture.optimizer_states import OptimizerStates
from fp8watch.capture.te.tensors import read_scales, scale_range

try:
    from float8_models import blocks
    from float8_models import train as train_float8
except ImportError:
    blocks = None


class Sealed(torch.Tensor):
    """A quantized tensor of a library that nobody knows: most operations are not implemented."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(f"{func} is not implemented")

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (4, 4), dtype=torch.float32)


def test_unknown_quantized_tensors_are_left_alone():  # case: HOK-22
    sealed = Sealed()
    assert read_scales(sealed) is None
    assert scale_range(sealed) is None
    parameter = nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"exp_avg": sealed}
    states = OptimizerStates(optimizer)
    assert states.read() == {}
    assert states.not_observable == "quantized moments of another layout: Sealed of torch.float32"
    layer = nn.Linear(4, 4)
    del layer.weight
    layer.weight = sealed
    assert shadow_gemm.why_not(layer) == "its weight is a Sealed"


@pytest.mark.skipif(blocks is None, reason="torchao is not installed")
def test_a_cast_of_an_unknown_tensor_reaches_no_training_step(caplog):  # case: HOK-22
    from fp8watch.capture.torchao.float8 import TorchaoSource
    from fp8watch.capture.torchao.taps import taps

    model = blocks(num=1)
    source = TorchaoSource(model)
    try:
        source.begin(with_statistics=True)
        owner = id(model[0].up.linear_mm_config)
        taps._tell(Sealed(), torch.tensor(1.0), torch.float8_e4m3fn, model[0].up.linear_mm_config, "input")
        assert taps.num_failures >= 1
        train_float8(model, 0)  # training goes on, unseen and said
        assert "failed and is switched off" in caplog.text
        assert owner in source._position
    finally:
        source.detach()
