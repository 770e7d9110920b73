"""Parameters without values (lazy modules, the meta device) are named at attach with what to do, and nothing starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8watch
from fp8watch.emulation import convert, taps
from fp8watch.errors import Refused, WrongArgument


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, **others: Any) -> list[str]:
    """The problems, without their place; nothing is left behind."""
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    threads = set(threading.enumerate())
    with pytest.raises(Refused) as caught:
        fp8watch.attach(model, optimizer, policy="auto", **others)
    assert isinstance(caught.value, WrongArgument)
    assert set(threading.enumerate()) <= threads
    assert "step" not in vars(optimizer)
    assert not taps._taps
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    return [problem.partition(": ")[2] for problem in caught.value.problems]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_lazy_parameters_are_named_and_after_one_forward_it_attaches(channel: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 16))
    convert(model)
    (problem,) = refused(model, sgd(model))
    assert problem == (
        "model: 0.weight, 0.bias are not initialised (lazy modules): "
        "run one forward, then make the optimizer and attach"
    )
    model(torch.zeros(2, 16))
    optimizer = sgd(model)
    watch = fp8watch.attach(model, optimizer)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    watch.step(1.0)
    assert (watch.global_step, watch.failures) == (1, {})


def test_a_lazy_module_that_the_optimizer_does_not_have_is_named_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyConv1d(4, 1, bias=False))
    (problem,) = refused(model, sgd(model[0]))
    assert problem.startswith("model: 1.weight is not initialised")


def test_parameters_on_the_meta_device_are_named_with_what_to_do() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    (problem,) = refused(model, sgd(model))
    assert problem.startswith("model: 0.weight, 0.bias, 1.weight, 1.bias and 4 more are on the meta device")
    assert "to_empty(device=...)" in problem


def test_an_optimizer_of_before_the_model_was_materialised_is_named() -> None:
    """It would go on updating tensors that nobody looks at any more."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    optimizer = sgd(model)
    model.to_empty(device="cpu")
    (problem,) = refused(model, optimizer)
    assert problem.startswith(
        "optimizer: param_groups[0]['params'][0], param_groups[0]['params'][1] are on the meta device"
    )


def test_all_of_it_is_said_at_once_and_each_once() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4, device="meta"))
    optimizer = sgd(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.empty(2, device="meta"))]})
    problems = refused(model, optimizer, run=5, lr_scheduler=3)
    assert [problem.partition(":")[0] for problem in problems] == ["model", "optimizer", "lr_scheduler", "run"]
    assert "0.weight, 0.bias are not initialised" in problems[0]
    assert "1.weight, 1.bias are on the meta device" in problems[0]
    assert "param_groups[1]['params'][0] is on the meta device" in problems[1]


def test_what_the_optimizer_does_not_update_may_stay_on_the_meta_device(channel: Callable[[], Any]) -> None:
    """A process may leave there what other processes hold."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    optimizer = sgd(model[0])
    watch = fp8watch.attach(model, optimizer)
    model[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    watch.step(1.0)
    assert (watch.global_step, watch.failures) == (1, {})
