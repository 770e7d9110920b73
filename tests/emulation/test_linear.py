"""The three GEMMs, the drop-in promises, BF16 fallback."""

from __future__ import annotations

import pytest
import torch
from emulated_models import Stack, batch, make_stack
from torch import nn

from fp8watch.emulation import DelayedScaling, Fp8Linear, convert
from fp8watch.emulation.cast import to_float8
from fp8watch.formats import E4M3, E5M2, Fp8Format


def dequantized(values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    return to_float8(values, scale, fmt).double() / scale


@pytest.mark.parametrize(("name", "gradient_format"), [("HYBRID", E5M2), ("E4M3", E4M3)])
@pytest.mark.parametrize("bias", [True, False])
def test_gemms_multiply_the_quantized_operands(name: str, gradient_format: Fp8Format, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(32, 48, bias, recipe=DelayedScaling(fp8_format=name))  # type: ignore[arg-type]
    for step in range(2):
        x = torch.randn(4, 8, 32, requires_grad=True)
        gy = torch.randn(4, 8, 48)
        layer.zero_grad()
        (sx, sw), sg = layer.scaling_forward.scale.clone(), layer.scaling_backward.scale[0].clone()
        y = layer(x)
        y.backward(gy)
        x8, w8 = dequantized(x.detach(), sx, E4M3), dequantized(layer.weight.detach(), sw, E4M3)
        g8 = dequantized(gy, sg, gradient_format)
        offset = 0 if layer.bias is None else layer.bias.double()
        assert step == 0 or sx > 1
        torch.testing.assert_close(y.double(), x8 @ w8.t() + offset, rtol=1e-5, atol=1e-5)
        assert x.grad is not None
        assert layer.weight.grad is not None
        torch.testing.assert_close(x.grad.double(), g8 @ w8, rtol=1e-5, atol=1e-5)
        expected = g8.flatten(0, 1).t() @ x8.flatten(0, 1)
        torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
        if layer.bias is not None:
            assert layer.bias.grad is not None
            torch.testing.assert_close(layer.bias.grad, gy.flatten(0, 1).sum(0), rtol=1e-5, atol=1e-5)


def test_scales_written_in_place_are_used_by_the_next_cast() -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(16, 16, False)
    x = torch.randn(64, 16)
    layer(x)
    layer.scaling_forward.scale.mul_(64)  # as an injector does: all but the smallest values clip
    limit = 448 / layer.scaling_forward.scale
    clipped = x.clamp(-limit[0], limit[0]) @ layer.weight.detach().clamp(-limit[1], limit[1]).t()
    got = layer(x)
    assert (got - clipped).norm() < 0.05 * clipped.norm()
    assert got.norm() < 0.01 * (x @ layer.weight.detach().t()).norm()


def test_an_update_replaced_on_the_instance_is_used() -> None:
    model = make_stack()
    model(batch(0)).sum().backward()
    frozen = model.head.scaling_forward
    frozen.update = lambda recipe, amax: None  # type: ignore[method-assign]
    before = frozen.scale.clone()
    moving = model.first.scaling_forward.scale.clone()
    model(batch(0, 100.0)).sum().backward()
    assert torch.equal(frozen.scale, before)
    assert not torch.equal(model.first.scaling_forward.scale, moving)


def test_bf16_weights_accumulate_like_any_gradient() -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(32, 32, dtype=torch.bfloat16, recipe=DelayedScaling(amax_history_len=1))
    first, second = torch.randn(8, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    layer(first).sum().backward()
    state = layer.scaling_forward.state_dict(), layer.scaling_backward.state_dict()
    layer.zero_grad()
    layer(second).sum().backward()
    assert layer.weight.grad is not None
    alone = layer.weight.grad.clone()
    layer.zero_grad()
    layer.scaling_forward.load_state_dict(state[0])
    layer.scaling_backward.load_state_dict(state[1])
    layer.weight.grad = torch.ones_like(layer.weight)
    layer(second).sum().backward()
    assert layer.weight.grad.dtype is torch.bfloat16
    assert torch.equal(layer.weight.grad, torch.ones_like(alone) + alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradient_dtypes_are_those_of_linear(dtype: torch.dtype) -> None:
    layer = Fp8Linear(16, 32, dtype=dtype)
    x = torch.randn(3, 16, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.dtype is dtype
    assert x.grad is not None
    assert x.grad.dtype is dtype
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is dtype
    assert layer.scaling_forward.scale.dtype is torch.float32
    assert layer.to(torch.bfloat16).scaling_forward.scale.dtype is torch.float32


def test_under_torch_autocast_the_output_is_bf16_and_the_gemm_is_not() -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(32, 32)
    x = torch.randn(8, 32)
    expected = layer(x)
    layer.start_fp8(layer.recipe, layer.amax_group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
    assert torch.equal(got, expected.bfloat16())


def test_no_tokens_at_all() -> None:
    layer = Fp8Linear(16, 32)
    x = torch.empty(0, 16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 16)
    assert layer.scaling_forward.scale[0] == 1.0


def test_nan_passes_through_but_not_into_amax_and_infinity_saturates() -> None:
    layer = Fp8Linear(16, 16)
    x = torch.ones(2, 16)
    x[0, 0] = torch.nan
    assert layer(x)[0].isnan().all()
    assert layer.scaling_forward.newest_amax[0] == 1.0
    x[0, 0] = torch.inf
    assert layer(x).isfinite().all()
    assert layer.scaling_forward.newest_amax[0].isinf()


def test_high_precision_is_bf16_and_says_so_only_when_it_ran() -> None:
    model = make_stack()
    layer = model.blocks[0].down
    model(batch(0)).sum().backward()
    assert layer.ran_high_precision is False
    layer.set_high_precision(True)
    assert layer.ran_high_precision is None
    x = torch.randn(4, 64, requires_grad=True)
    y = layer(x)
    assert layer.ran_high_precision is True
    expected = x.bfloat16().float() @ layer.weight.bfloat16().float().t() + layer.bias
    torch.testing.assert_close(y, expected)
    layer.set_high_precision(False)
    assert layer.ran_high_precision is None
    assert not torch.equal(layer(x), expected)


def test_return_from_high_precision_starts_with_scales_of_the_amax_seen_meanwhile() -> None:
    layer = Fp8Linear(16, 16, recipe=DelayedScaling(amax_compute_algo="most_recent"))
    layer(torch.ones(2, 16)).sum().backward()
    layer.scaling_forward.update = lambda recipe, amax: None  # type: ignore[method-assign]
    layer.scaling_forward.scale.fill_(1e6)
    layer.set_high_precision(True)
    layer(torch.full((2, 16), 7.0)).sum().backward()
    layer.set_high_precision(False)
    assert float(layer.scaling_forward.scale[0]) == 64.0


def test_backward_keeps_the_precision_of_its_forward() -> None:
    layer = Fp8Linear(16, 16, recipe=DelayedScaling(amax_history_len=1))
    layer.set_high_precision(True)
    x = torch.randn(4, 16, requires_grad=True)
    y = layer(x)
    layer.set_high_precision(False)
    gy = torch.randn(4, 16)
    y.backward(gy)
    torch.testing.assert_close(x.grad, gy.bfloat16().float() @ layer.weight.bfloat16().float())


def test_conversion_keeps_modules_parameters_and_state_dict() -> None:
    torch.manual_seed(0)
    plain, model = Stack(), Stack()
    parameters, modules = list(model.parameters()), list(model.modules())
    names = convert(model, filter=lambda name, linear: name != "head")
    assert "head" not in names
    assert len(names) == 1 + 3 * 3
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    model(batch(0)).sum().backward()
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert convert(model) == ["head"]
    assert convert(model) == []
    assert len(model._forward_hooks) == 1


def test_shapes_the_hardware_refuses_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 32), nn.Linear(32, 16))
    assert convert(model) == ["2"]
    assert convert(model, filter=lambda name, linear: True) == ["0", "1"]


def test_a_linear_can_be_the_root() -> None:
    layer = nn.Linear(16, 16)
    assert convert(layer) == [""]
    layer(torch.randn(2, 16)).sum().backward()
    assert layer.scaling_forward.scale[0] != 1  # type: ignore[union-attr, index]


@pytest.mark.parametrize("recipe", [DelayedScaling(), DelayedScaling(amax_history_len=1, fp8_format="E4M3")])
def test_fp8_trains_about_as_well_as_fp32(recipe: DelayedScaling) -> None:
    losses = []
    for is_fp8 in (False, True):
        torch.manual_seed(0)
        model = Stack()
        if is_fp8:
            convert(model, recipe)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        target = torch.randn(32, 32) / 6
        for step in range(120):
            x = batch(step)
            loss = (model(x) - x @ target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < 0.2
    assert losses[1] == pytest.approx(losses[0], rel=0.15)
