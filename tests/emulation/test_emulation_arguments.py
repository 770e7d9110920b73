"""Every argument of the emulation that is not what it should be is named with what is wanted; nothing is changed."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8watch.emulation import DelayedScaling, Fp8Linear, ScalingState, autocast, convert, fp8_modules
from fp8watch.emulation.recipe import MAX_HISTORY
from fp8watch.emulation.update import AmaxGroup
from fp8watch.formats import E4M3, E5M2, MAX_MARGIN

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("field", "value", "kind", "said"),
    [
        ("margin", -500, ValueError, "from -16 to 16 is wanted, got -500"),
        ("margin", 16.5, ValueError, "from -16 to 16 is wanted, got 16.5"),
        ("margin", math.inf, ValueError, "got inf"),
        ("margin", math.nan, ValueError, "got nan"),
        ("margin", "1", TypeError, "a number is wanted, got str '1'"),
        ("margin", True, TypeError, "a number is wanted, got bool True"),
        ("margin", None, TypeError, "a number is wanted, got NoneType"),
        ("fp8_format", "E5M2", ValueError, "'HYBRID' or 'E4M3' is wanted, got str 'E5M2'"),
        ("fp8_format", "hybrid", ValueError, "'HYBRID' or 'E4M3' is wanted, got str 'hybrid'"),
        ("fp8_format", E4M3, ValueError, "got Fp8Format"),
        ("fp8_format", [], ValueError, "got list"),
        ("amax_history_len", 0, ValueError, f"from 1 to {MAX_HISTORY} is wanted, got 0"),
        ("amax_history_len", 10**9, ValueError, f"from 1 to {MAX_HISTORY} is wanted"),
        ("amax_history_len", 16.0, TypeError, "a whole number is wanted, got float 16.0"),
        ("amax_history_len", True, TypeError, "a whole number is wanted, got bool True"),
        ("amax_compute_algo", "mean", ValueError, "'max' or 'most_recent' is wanted, got str 'mean'"),
        ("amax_compute_algo", max, ValueError, "got builtin_function_or_method"),
        ("reduce_amax", 1, TypeError, "True or False is wanted, got int 1"),
    ],
)
def test_a_recipe_takes_no_nonsense_neither_made_nor_changed(
    field: str, value: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as made:
        DelayedScaling(**{field: value})
    recipe = DelayedScaling()
    before = getattr(recipe, field)
    with pytest.raises(kind) as changed:
        setattr(recipe, field, value)
    assert str(made.value) == str(changed.value)
    assert str(made.value).startswith(f"{field}: ")
    assert said in str(made.value)
    assert getattr(recipe, field) == before


def test_what_is_at_the_bounds_is_taken_and_a_copy_is_the_same() -> None:
    for margin in (-MAX_MARGIN, 0, 3, 0.5, MAX_MARGIN):
        recipe = DelayedScaling(margin=margin, amax_history_len=MAX_HISTORY)
        assert pickle.loads(pickle.dumps(recipe)).margin == margin


def test_the_bound_of_the_margin_is_where_the_range_ends() -> None:
    """At +16 some of a tensor is left, three powers of two further nothing."""
    assert E4M3.max * 2.0**-MAX_MARGIN > 3 * E4M3.min_subnormal
    assert E4M3.max * 2.0 ** -(MAX_MARGIN + 3) < E4M3.min_subnormal / 2
    layer = Fp8Linear(16, 16, recipe=DelayedScaling(margin=MAX_MARGIN, amax_history_len=1))
    for _ in range(2):
        y = layer(torch.randn(64, 16))
    assert float(y.detach().abs().max()) > 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: convert(3), "model: a torch.nn.Module is wanted, got int 3"),
        (lambda m: convert(nn.Linear), "model: a torch.nn.Module is wanted, got the class Linear itself"),
        (lambda m: convert(m, 3), "recipe: fp8watch.emulation.DelayedScaling(...) is wanted, got int 3"),
        (
            lambda m: convert(m, DelayedScaling),
            "recipe: fp8watch.emulation.DelayedScaling(...) is wanted, got the class",
        ),
        (lambda m: convert(m, 0), "recipe: "),
        (lambda m: convert(m, filter=["0"]), "filter: a function filter(name, linear) "),
        (lambda m: convert(m, filter=""), "filter: a function filter(name, linear) "),
        (lambda m: convert(m, filter=nn.Linear), "got the class Linear itself"),
        (lambda m: convert(m, amax_group=[0, 1]), "amax_group: a process group of torch.distributed is wanted"),
        (lambda m: convert(m, amax_group=-100), "got int -100"),
        (lambda m: Fp8Linear(16, 16, recipe="E4M3"), "recipe: fp8watch.emulation.DelayedScaling(...) is wanted"),
        (lambda m: Fp8Linear(16, 16, amax_group=3), "amax_group: "),
        (lambda m: Fp8Linear(16, 16).set_high_precision("no"), "high_precision: True or False is wanted, got str 'no'"),
        (lambda m: AmaxGroup("tp"), "amax_group: "),
        (lambda m: ScalingState("input", E4M3, 4, CPU), "tensors: the names of one or more tensors"),
        (lambda m: ScalingState((), E4M3, 4, CPU), "tensors: the names of one or more tensors"),
        (lambda m: ScalingState(("a", 3), E4M3, 4, CPU), "tensors: the names of one or more tensors"),
        (lambda m: ScalingState(("a",), "e4m3", 4, CPU), "fmt: one of fp8watch.formats is wanted, got str 'e4m3'"),
        (lambda m: ScalingState(("a",), E5M2, 4.0, CPU), "history_len: a whole number is wanted"),
        (lambda m: fp8_modules(None), "model: a torch.nn.Module is wanted, got NoneType"),
        (lambda m: autocast(True).__enter__(), "owner: a torch.nn.Module is wanted, got bool True"),
    ],
)
def test_arguments_of_another_kind_are_named(call: Callable[[nn.Module], Any], said: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(TypeError) as caught:
        call(model)
    assert said in str(caught.value)
    assert type(model[0]) is nn.Linear
    assert not model._forward_pre_hooks


def test_a_history_of_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="history_len: from 1 to"):
        ScalingState(("a",), E4M3, 0, CPU)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_with_nothing_to_multiply_stay_as_they_are_and_cannot_be_chosen() -> None:
    model = nn.Sequential(
        nn.Linear(32, 0), nn.Linear(0, 32), nn.Linear(32, 32), nn.Linear(16, 16, dtype=torch.complex64)
    )
    with pytest.raises(ValueError, match="nothing to multiply") as caught:
        convert(model, filter=lambda name, linear: True)
    assert str(caught.value).split("; ") == [
        "0: 0 x 32: there is nothing to multiply", "1: 32 x 0: there is nothing to multiply",
        "3: weights of torch.complex64: floating point is wanted",
    ]  # fmt: skip
    assert [type(layer) for layer in model] == [nn.Linear] * 4
    assert convert(model) == ["2"]
    for sizes in ((0, 32), (32, 0)):
        with pytest.raises(ValueError, match="nothing to multiply"):
            Fp8Linear(*sizes)


def test_lazy_layers_are_said_to_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fp8watch")
    model = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 16))
    assert convert(model) == ["1"]
    assert "0 is lazy and stays as it is: run one forward first, and convert the model then" in caplog.text
    model(torch.zeros(2, 16))
    assert convert(model) == ["0"]


# No second derivative


def penalised(net: nn.Module, **grad: Any) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True, **grad)
    (net(x).sum() + gradient.pow(2).sum()).backward()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_gradient_penalty_is_refused_in_words_and_never_left_out(depth: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Tanh()] * depth
    penalised(nn.Sequential(*layers))  # torch's own layers can
    net = nn.Sequential(*layers)
    convert(net)
    with pytest.raises(RuntimeError, match=r"no double backward.*create_graph=True.*convert\(model, filter="):
        penalised(net)
    layer = net[0]
    for parameter in net.parameters():
        parameter.grad = None
    net(torch.randn(8, 16)).sum().backward()  # and it trains on
    assert layer.weight.grad is not None


def test_of_a_sum_or_a_hessian_nothing_is_silently_zero() -> None:
    net = nn.Sequential(nn.Linear(16, 16))
    convert(net)
    x = torch.randn(8, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        torch.autograd.functional.hvp(lambda value: net(value).sum(), x.detach(), torch.ones(8, 16))


def test_layers_outside_of_the_penalty_may_be_fp8() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    convert(net, filter=lambda name, linear: name == "0")
    hidden = net[0](torch.randn(8, 16)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(net[2](net[1](hidden)).sum(), hidden, create_graph=True)
    gradient.pow(2).sum().backward()
    assert net[2].weight.grad is not None
