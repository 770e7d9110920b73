"""Amaxes that a Transformer Engine module measures in BF16 for its return, on stand-ins with the same layout."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from standin_te.tensors import DType
from test_te_controls import STATE, autocast

from fp8watch.capture.te.controls import TeControls

FORMATS = {"HYBRID": DType.kFloat8E5M2, "E4M3": DType.kFloat8E4M3}
GRADIENT_MAX = {"HYBRID": 57344.0, "E4M3": 448.0}
STALE = 3.0


class Base(torch.nn.Module):
    """Decides its precision at each forward; state of `num_gemms`, three slots forward and two backward a GEMM."""

    def __init__(self, num_gemms: int, fmt: str) -> None:
        super().__init__()
        self.num_gemms, self.fp8 = num_gemms, False
        self.fp8_meta: dict[str, Any] = {"recipe": SimpleNamespace(fp8_format=f"Format.{fmt}")}
        for key, a_gemm, dtype in (("scaling_fwd", 3, DType.kFloat8E4M3), ("scaling_bwd", 2, FORMATS[fmt])):
            num = a_gemm * num_gemms
            scale, history = torch.full((num,), STALE), torch.zeros(4, num)
            self.fp8_meta[key] = SimpleNamespace(scale=scale, amax_history=history, dtype=dtype)

    def weights(self, *names: str) -> None:
        for i, name in enumerate(names):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(8, 8) * (i + 1)))


class Linear(Base):
    def __init__(self, fmt: str) -> None:
        super().__init__(1, fmt)
        self.weights("query_weight", "key_weight")
        self.weight_names = ["query_weight", "key_weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fp8 = STATE[0]
        return F.linear(x, self.query_weight) + F.linear(x, self.key_weight)


class LayerNormLinear(Base):
    def __init__(self, fmt: str, normalization: str) -> None:
        super().__init__(1, fmt)
        self.weights("weight")
        self.normalization, self.eps, self.zero_centered_gamma = normalization, 1e-5, True
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(8))
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.rand(8))

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        gamma = 1 + self.layer_norm_weight
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, (8,), gamma, self.eps)
        return F.layer_norm(x, (8,), gamma, self.layer_norm_bias, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fp8 = STATE[0]
        return F.linear(self.normalised(x), self.weight)


class LayerNormMLP(LayerNormLinear):
    def __init__(self, fmt: str) -> None:
        super().__init__(fmt, "RMSNorm")
        Base.__init__(self, 2, fmt)
        self.normalization, self.eps, self.zero_centered_gamma = "RMSNorm", 1e-5, True
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(8))
        self.weights("fc1_weight", "fc2_weight")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.fp8 = STATE[0]
        return F.linear(F.linear(self.normalised(x), self.fc1_weight).relu(), self.fc2_weight), None


class GroupedLinear(Base):
    def __init__(self, fmt: str) -> None:
        super().__init__(2, fmt)
        self.weights("weight0", "weight1")

    def forward(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        self.fp8 = STATE[0]
        weights = self.weight0, self.weight1
        return torch.cat([F.linear(part, weight) for part, weight in zip(x.split(splits), weights, strict=True)])


def controls_of(module: torch.nn.Module) -> TeControls:
    quantization = SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(global_amax_buffer={}, autocast_arguments={}))
    model = torch.nn.ModuleDict({"a": module})
    return TeControls(model, library=SimpleNamespace(autocast=autocast), quantization=quantization)


def returned(module: Any, x: torch.Tensor, *rest: Any) -> tuple[list[float], list[float], torch.Tensor]:
    """Amaxes that the scales stand for after the return, forward and backward (NaN: the old scale); the gradient."""
    controls = controls_of(module)
    controls.set_high_precision(["a"], high_precision=True)
    output = module(x, *rest)
    output = output[0] if isinstance(output, tuple) else output
    gradient = torch.randn_like(output) * 1e-3
    output.backward(gradient)
    controls.set_high_precision(["a"], high_precision=False)
    found = []
    for key in ("scaling_fwd", "scaling_bwd"):
        state = module.fp8_meta[key]
        fp8_max = 448.0 if state.dtype is DType.kFloat8E4M3 else 57344.0
        found.append([math.nan if s == STALE else fp8_max / s for s in state.scale.tolist()])
    assert STATE == [True]
    return found[0], found[1], gradient


def amax(values: torch.Tensor) -> float:
    return values.detach().abs().max().item()


def approx(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-5, nan_ok=True)


NAN = math.nan


@pytest.mark.parametrize("fmt", ["HYBRID", "E4M3"])
def test_a_linear_layer_has_its_input_all_its_weights_and_its_gradient_in_its_own_format(fmt: str) -> None:
    module, x = Linear(fmt), torch.randn(4, 8)
    forward, backward, gradient = returned(module, x)
    assert forward == approx(amax(x), max(amax(module.query_weight), amax(module.key_weight)), NAN)
    assert backward == approx(amax(gradient), NAN)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_behind_a_norm_the_input_is_what_the_norm_makes(normalization: str) -> None:
    module, x = LayerNormLinear("HYBRID", normalization), torch.randn(4, 8) * 100
    forward, backward, gradient = returned(module, x)
    assert forward == approx(amax(module.normalised(x)), amax(module.weight), NAN)
    assert backward == approx(amax(gradient), NAN)
    assert module.fp8_meta["scaling_fwd"].amax_history[-1, 0] < 20, "nor may the raw input stay in the window"


def test_what_stays_inside_a_module_keeps_its_scale() -> None:
    module, x = LayerNormMLP("HYBRID"), torch.randn(4, 8) * 100
    forward, backward, gradient = returned(module, x)
    weights = amax(module.fc1_weight), amax(module.fc2_weight)
    assert forward == approx(amax(module.normalised(x)), weights[0], NAN, NAN, weights[1], NAN)
    assert backward == approx(NAN, NAN, amax(gradient), NAN)


def test_experts_share_what_is_known_of_all() -> None:
    module, x = GroupedLinear("HYBRID"), torch.randn(4, 8)
    forward, backward, gradient = returned(module, x, [1, 3])
    assert forward == approx(amax(x), amax(module.weight0), NAN, amax(x), amax(module.weight1), NAN)
    assert backward == approx(amax(gradient), NAN, amax(gradient), NAN)


def test_no_tokens_have_no_amax() -> None:  # case: NUM-30
    module = GroupedLinear("HYBRID")
    forward, backward, _ = returned(module, torch.randn(0, 8), [0, 0])
    assert forward == approx(NAN, amax(module.weight0), NAN, NAN, amax(module.weight1), NAN)
    assert backward == approx(NAN, NAN, NAN, NAN)


def test_a_module_that_mixes_recipes_keeps_its_scales() -> None:
    """Its state has fewer places than it has tensors: the place of an input is not the first any more."""
    module = Linear("HYBRID")
    module.fp8_meta["scaling_fwd"] = SimpleNamespace(
        scale=torch.full((1,), STALE), amax_history=torch.zeros(4, 1), dtype=DType.kFloat8E4M3
    )
    module.quantizers = {"scaling_fwd": [object()] * 3, "scaling_bwd": [object()] * 2}
    forward, _, _ = returned(module, torch.randn(4, 8))
    assert forward == approx(NAN)


def test_what_cannot_be_measured_does_not_reach_training(caplog: pytest.LogCaptureFixture) -> None:  # case: NUM-18
    module, x = LayerNormLinear("HYBRID", "RMSNorm"), torch.randn(4, 8)
    wanted = module(x)
    module.eps = "broken"  # of another version, say
    module.normalised = lambda given: F.rms_norm(given, (8,), 1 + module.layer_norm_weight, 1e-5)
    controls = controls_of(module)
    controls.set_high_precision(["a"], high_precision=True)
    for _ in range(2):
        assert torch.equal(module(x), wanted)
    controls.set_high_precision(["a"], high_precision=False)
    assert module.fp8_meta["scaling_fwd"].scale.tolist() == [STALE] * 3
    assert caplog.text.count("cannot be measured") == 1
