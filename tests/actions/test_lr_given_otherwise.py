"""LRs that are no floats of their own: one tensor for all groups, or none at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8watch.actions.lr_control import LrControl
from fp8watch.actions.lr_rules import Hold


def two_groups() -> list[dict[str, object]]:
    return [{"params": nn.Linear(4, 4).parameters()}, {"params": nn.Linear(4, 4).parameters()}]


def test_one_lr_tensor_that_all_groups_share_is_changed_once_and_comes_back() -> None:
    optimizer = torch.optim.AdamW(two_groups(), lr=torch.tensor(1e-2), foreach=False)
    shared = optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[1]["lr"] is shared, "what torch does with a tensor given as the default"
    control = LrControl(optimizer)
    control.add("hold_lr:1", Hold(begin=0, steps=None, factor=0.5))
    for _ in range(3):
        control.enter()
        assert float(shared) == pytest.approx(5e-3)
        control.leave()
        assert float(shared) == pytest.approx(1e-2)
    assert [float(lr) for lr in control.effective] == pytest.approx([5e-3, 5e-3])
    assert control.demanded() == pytest.approx([5e-3, 5e-3])


def test_without_a_learning_rate_none_can_be_changed_and_none_is_read() -> None:
    optimizer = torch.optim.SGD(two_groups(), lr=1e-2)  # type: ignore[arg-type]
    for group in optimizer.param_groups:
        group["lr"] = None  # as Adafactor with relative steps
    control = LrControl(optimizer)
    assert "lr=None" in (control.unavailable() or "")
    control.enter()
    control.leave()
    assert control.effective_lr() is None
    assert control.factor() == 1.0
