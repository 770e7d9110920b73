"""Which module a GEMM call belongs to: experts of one module, indistinguishable gradients, reused memory."""

from __future__ import annotations

import numpy as np
import pytest
import standin_te.module.grouped_linear as grouped
import standin_te.module.layernorm_mlp as mlp
import standin_te.module.linear as linear
import torch
from standin_te.tensors import Float8TensorStorage, quantize
from test_te_stateless import EXTENSION, batch, columns, places, run
from torch import nn

from fp8watch.capture.te.gemm_tap import GemmTap
from fp8watch.capture.te.source import TeSource
from fp8watch.capture.te.stateless import TeStatelessSource


@pytest.fixture
def tap():
    before = places()
    yield GemmTap("standin_te.module")
    assert places() == before


@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize("with_input_gradient", [False, True])
def test_each_expert_has_its_own_rows(tap, block, with_input_gradient):  # case: NUM-30
    torch.manual_seed(0)
    model = nn.ModuleDict({"moe": grouped.GroupedLinear(3, 16, 8, block)})
    source = TeStatelessSource(model, tap=tap)
    try:
        x = batch(1).mul(torch.tensor([1.0] * 8 + [4.0] * 8).unsqueeze(1)).requires_grad_(with_input_gradient)
        output = model["moe"](x, [8, 8, 0])
        gradient = torch.randn_like(output)
        output.backward(gradient)
        reading = source.read()
        amax = columns(source, reading)
        assert (reading.updates_forward, reading.updates_backward) == (1, 1)
        parts = {"input": x.detach(), "grad_output": gradient}
        for i in range(2):
            for tensor, values in parts.items():
                wanted = values[8 * i : 8 * i + 8].abs().max().item()
                assert amax[f"moe.gemm_{i}:{tensor}"] == pytest.approx(wanted, rel=1e-5)
            wanted = model["moe"].get_parameter(f"weight{i}").abs().max().item()
            assert amax[f"moe.gemm_{i}:weight"] == pytest.approx(wanted, rel=1e-5)
        assert [name for name in amax if "gemm_2" in name] == ["moe.gemm_2:weight"], "an expert without tokens"
        assert (tap.num_unmatched, tap.num_failures) == (0, 0)
        assert source.not_observable() == []
    finally:
        source.detach()


class _CastAnew(torch.autograd.Function):
    """A layer whose weight is quantized again for the backward, as under FSDP2 and in TE's own recomputation."""

    @staticmethod
    def forward(ctx, inp, weight, module):
        ctx.saved = inp, weight
        return linear.general_gemm(quantize(weight), quantize(inp))[0]

    @staticmethod
    def backward(ctx, grad):
        inp, weight = ctx.saved
        again = mlp.general_gemm(quantize(weight), quantize(inp))  # a GEMM of a forward, outside any module's forward
        assert again
        dy = quantize(grad, "kFloat8E5M2")
        dx, *_ = linear.general_gemm(quantize(weight), dy, layout="NN", grad=True)
        dw, *_ = linear.general_gemm(quantize(inp), dy, layout="NT", grad=True)
        return dx, dw, None


def test_a_module_whose_gradients_cannot_be_told_apart_is_named(tap):
    class Anew(linear.Linear):
        def forward(self, inp):
            output = _CastAnew.apply(self.prepare_forward(inp), self.weight, self)
            self.end_forward()
            return output

    torch.manual_seed(0)
    model = nn.Sequential(linear.Linear(16, 16), Anew(16, 16), linear.Linear(16, 16))
    source = TeSource(model, extension=EXTENSION, tap=tap)
    try:
        for seed in range(4):
            source.begin(with_statistics=False)
            run(model, seed)
            reading = source.read()
        names = list(columns(source, reading))
        assert "1:input" in names
        assert "1:grad_output" not in names
        assert {"0:grad_output", "2:grad_output"} <= set(names)
        assert not [name for name in names if ".fc" in name], "what it computes again is no GEMM of another module"
        assert [entry.partition(":")[0] for entry in source.not_observable()] == ["1"]
    finally:
        source.detach()


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_that_was_given_to_somebody_else_tells_no_module(tap, is_kept):
    """An address comes back within a step, as soon as what lay there is gone."""
    buffer, told = np.ones(1, dtype=np.float32), []

    def operand():
        return Float8TensorStorage(torch.ones(4, 4), torch.from_numpy(buffer))

    module = linear.Linear(4, 4)
    tap.subscribe(lambda *call: told.append(call[2]))
    try:
        module.prepare_forward(torch.ones(4, 4))
        weight = operand()
        linear.general_gemm(weight, torch.ones(4, 4))
        module.end_forward()
        if not is_kept:
            del weight
        again = operand()
        linear.general_gemm(again, quantize(torch.ones(4, 4), "kFloat8E5M2"), layout="NN", grad=True)
        assert told == (["weight", "grad_output"] if is_kept else ["weight"])
        assert tap.num_unmatched == (0 if is_kept else 1)
    finally:
        tap._subscribers = ()
        tap._uninstall()
