"""Where restored optimizer state lies: beside its parameter, as torch's own loading puts it. The meta device stands in
for an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_run import PlainRun

from fp8watch.checkpoints import optimizer_state


class Keeper(torch.optim.Optimizer):
    """Keeps whatever is put into its state."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, **defaults})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Nothing."""


def state() -> dict[str, Any]:
    tensor = torch.arange(4.0)
    return {
        "plain": tensor, "scalar": torch.tensor(2.0), "step": torch.tensor(3.0), "list": [tensor, [tensor]],
        "pair": (tensor, 1), "nested": {"a": tensor, "step": torch.tensor(3.0)}, "number": 7,
    }  # fmt: skip


def places(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, dict):
        return {key: places(item) for key, item in value.items()}
    return [places(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("defaults", [{}, {"capturable": True}, {"fused": True}])
def test_it_lies_where_torch_puts_it(defaults: dict[str, Any]) -> None:
    found = []
    for load in (optimizer_state.restore, lambda optimizer, saved: optimizer.load_state_dict(saved)):
        parameter = torch.nn.Parameter(torch.empty(4, device="meta"))
        optimizer = Keeper([parameter], **defaults)
        saved = {"state": {0: state()}, "param_groups": [{**optimizer.param_groups[0], "params": [0]}]}
        load(optimizer, saved)
        found.append(places(optimizer.state[parameter]))
    assert found[0] == found[1]
    assert found[0]["list"] == ["meta", ["meta"]]
    assert found[0]["nested"] == {"a": "meta", "step": "meta" if defaults else "cpu"}


def test_what_is_restored_is_a_copy_however_deep_it_lies() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = Keeper([parameter])
    saved = {"state": {0: state()}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    for restore in (optimizer_state.restore, _by_its_own_loading):
        restore(optimizer, saved)
        live = optimizer.state[parameter]
        for tensor in (live["plain"], live["list"][0], live["list"][1][0], live["pair"][0], live["nested"]["a"]):
            tensor.add_(100)
    assert saved["state"][0]["list"][0].tolist() == [0, 1, 2, 3]


def _by_its_own_loading(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    handle = optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
    assert optimizer_state.uses_own_loading(optimizer)
    optimizer_state.restore(optimizer, saved)
    handle.remove()


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_lists_and_dicts_of_tensors_come_back_in_a_new_process(tmp_path: Path, format: Any) -> None:
    """LBFGS keeps its directions in lists, Shampoo its factors."""

    def run() -> PlainRun:
        made = PlainRun(tmp_path, format=format)
        made.optimizer = made.parts.optimizer = torch.optim.LBFGS(made.model.parameters(), lr=0.1, max_iter=3)
        return made

    def step(made: PlainRun) -> float:
        inputs = torch.randn(8, 4)

        def closure() -> torch.Tensor:
            made.optimizer.zero_grad()
            loss = (made.model(inputs) - inputs).square().mean()
            loss.backward()
            return loss

        made.step_number += 1
        return float(made.optimizer.step(closure).detach())

    first = run()
    for _ in range(3):
        step(first)
    name = first.save()
    losses = [step(first) for _ in range(3)]
    second = run()
    second.manager.restore(name)
    assert [step(second) for _ in range(3)] == losses
