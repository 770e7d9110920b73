"""The shadow probe: runs a layer's GEMM again in BF16, from outside and without any effect on training."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import standin_te.module.layernorm_mlp as te_mlp
import standin_te.module.linear as te_linear
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch.capture.cost_meter import CostMeter
from fp8watch.capture.shadow_probe import ShadowProbe
from fp8watch.emulation import DelayedScaling, Fp8Linear, convert
from fp8watch.formats import E4M3, expected_gemm_error

ORDINARY = expected_gemm_error(E4M3, E4M3)


def probe_of(model: nn.Module, kind: type[nn.Module] = Fp8Linear) -> ShadowProbe:
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    return ShadowProbe(modules, CostMeter(torch.device("cpu")))


def make(bias: bool = True, **recipe: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=bias), nn.Dropout(0.1), nn.Linear(128, 32, bias=bias))
    convert(model, DelayedScaling(**{"amax_history_len": 4, **recipe}))
    return model


def batch(seed: int = 0, factor: float = 1.0) -> torch.Tensor:
    return factor * torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int = 0, factor: float = 1.0) -> torch.Tensor:
    output = model(batch(seed, factor))
    output.square().mean().backward()
    return output


@pytest.mark.parametrize("bias", [True, False])
def test_an_ordinary_layer_has_the_error_of_its_formats(bias):
    model, probe = make(bias), probe_of(make())
    probe = probe_of(model)
    for seed in range(3):
        step(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(3.0)  # a large bias is no part of what is compared
    assert probe.arm("0")
    step(model, 5)
    name, error = probe.take()
    assert name == "0"
    assert error.shape == ()
    assert not error.requires_grad
    assert error.item() == pytest.approx(ORDINARY, rel=0.25)  # uniform weights and normal inputs


def test_a_scale_far_too_large_shows():
    model = make()
    probe = probe_of(model)
    step(model, 0)
    for layer in (model[0], model[2]):
        layer.scaling_forward.scale.mul_(16)
    probe.arm("0")
    step(model, 1)
    assert probe.take()[1].item() > 3 * ORDINARY


def test_a_layer_in_bf16_has_next_to_no_error():
    model = make()
    probe = probe_of(model)
    model[0].set_high_precision(True)
    probe.arm("0")
    step(model)
    assert probe.take()[1].item() < ORDINARY / 5


def test_training_is_bit_identical_with_the_probe_on():
    def run(*, probed: bool) -> list[torch.Tensor]:
        model = make()
        probe = probe_of(model)
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        for seed in range(4):
            if probed:
                assert probe.arm(("0", "2")[seed % 2])
            optimizer.zero_grad()
            kept.append(step(model, seed).detach().clone())
            kept += [p.grad.clone() for p in model.parameters()]
            if probed:
                assert probe.take() is not None
            optimizer.step()
        histories = [model[i].scaling_forward.amax_history.clone() for i in (0, 2)]
        return [*kept, *histories, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(run(probed=True), run(probed=False), strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_layer_is_probed_in_its_first_forward(reentrant):  # case: HOK-06
    model = make()
    probe = probe_of(model)
    step(model, 0)
    calls = []
    probe.arm("0")
    model[0].register_forward_pre_hook(lambda module, args: calls.append(probe._made is not None))
    x = batch(1).requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    assert len(calls) == 2
    assert calls == [True, False]
    assert probe.take()[1].item() == pytest.approx(ORDINARY, rel=0.25)


def test_several_micro_batches_are_probed_once_and_evaluation_never():  # case: NUM-28
    model = make()
    probe = probe_of(model)
    step(model, 0)
    probe.arm("0")
    model.eval()
    with torch.no_grad():
        model(batch(9, 1e6))
    model.train()
    step(model, 1)
    first = probe._error
    step(model, 2, 1e4)  # clips: would show if it counted
    assert probe.take()[1] is first
    probe.arm("0")
    model.eval()
    step(model, 3)
    assert probe.take() is None
    assert "did not run" in probe.missed["0"]


def test_no_hook_and_no_tensor_stays():
    model = make()
    probe = probe_of(model)
    probe.arm("0")
    x = batch()
    kept = weakref.ref(x)
    model(x).square().mean().backward()
    del x
    assert kept() is None
    probe.take()
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    probe.arm("2")
    probe.detach()
    assert not model[2]._forward_hooks


def test_copies_of_a_probed_model_carry_no_live_hook():  # case: HOK-09
    model = make()
    probe = probe_of(model)
    step(model)
    probe.arm("0")
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        step(other)
    assert probe._error is None
    step(model)
    assert probe.take() is not None


def test_what_cannot_be_run_again_is_named():
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": te_mlp.LayerNormMLP(32, 64), "fc": te_linear.Linear(32, 16)})

    class Odd(Fp8Linear):
        @property
        def weight_names(self):
            raise RuntimeError("no such thing")

    model["odd"] = Odd(8, 8)
    probe = ShadowProbe(dict(model.items()), CostMeter(torch.device("cpu")))
    assert probe.names == ["fc"]
    assert "LayerNormMLP" in probe.not_probeable["mlp"]
    assert probe.not_probeable["odd"] == "RuntimeError: no such thing"
    assert not probe.arm("mlp")
    assert probe.take() is None
    probe.arm("fc")
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    model["fc"](x).sum().backward()
    assert probe.take()[1].item() == pytest.approx(ORDINARY, rel=0.3)  # a Linear of Transformer Engine's shape


def test_a_fused_norm_is_made_again():
    class LayerNormLinear(nn.Module):
        def __init__(self, normalization: str) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.weight = nn.Parameter(torch.randn(16, 32) / 6)
            self.bias = nn.Parameter(torch.ones(16))
            self.layer_norm_weight = nn.Parameter(torch.rand(32) - 0.5)
            self.layer_norm_bias = nn.Parameter(torch.rand(32))
            self.normalization, self.eps, self.zero_centered_gamma, self.apply_bias = normalization, 1e-5, True, True
            self.weight_names, self.bias_names, self.tp_size = ["weight"], ["bias"], 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gamma = 1 + self.layer_norm_weight
            if self.normalization == "LayerNorm":
                x = torch.nn.functional.layer_norm(x, (32,), gamma, self.layer_norm_bias, self.eps)
            else:
                x = torch.nn.functional.rms_norm(x, (32,), gamma, self.eps)
            return torch.nn.functional.linear(x, self.weight, self.bias)

    LayerNormLinear.__module__ = "transformer_engine.pytorch.module.layernorm_linear"
    derived = type("TELayerNormColumnParallelLinear", (LayerNormLinear,), {"__module__": "megatron.core.extensions"})
    for normalization, kind in (("LayerNorm", LayerNormLinear), ("RMSNorm", LayerNormLinear), ("RMSNorm", derived)):
        layer = kind(normalization)
        probe = ShadowProbe({"qkv": layer}, CostMeter(torch.device("cpu")))
        probe.arm("qkv")
        layer(torch.randn(8, 4, 32))
        assert probe.take()[1].item() < 0.006  # BF16 against FP32
    layer.tp_size = 2
    assert "tensor parallel" in ShadowProbe({"qkv": layer}, CostMeter(torch.device("cpu"))).not_probeable["qkv"]


def test_only_some_rows_of_a_long_input_are_taken():
    model = nn.Sequential(nn.Linear(16, 16))
    convert(model, DelayedScaling(amax_history_len=1))
    probe = probe_of(model)
    x = torch.randn(5000, 16)
    model(x).sum().backward()
    probe.arm("0")
    model(x).sum().backward()
    assert probe.take()[1].item() == pytest.approx(ORDINARY, rel=0.3)


def test_a_probe_that_raises_is_given_up_and_training_goes_on(monkeypatch, caplog):  # case: NUM-18
    model = make()
    probe = probe_of(model)

    def broken(module: nn.Module, given: torch.Tensor) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("fp8watch.capture.shadow_gemm.shadow", broken)
    probe.arm("0")
    step(model)
    assert probe.take() is None
    assert probe.not_probeable["0"] == "RuntimeError: broken"
    assert "0" not in probe.names
    assert caplog.text.count("shadow probe of 0 failed") == 1
