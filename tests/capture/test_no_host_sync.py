"""Nothing in a watched step turns a device tensor into a Python number.

A CPU has no stream to wait for, so operations that would make a GPU's host wait are forbidden while fp8watch runs:
`aten::_local_scalar_dense` (item, float, bool, an `if` on a tensor), nonzero and masked selection (the host needs the
size of their result), and blocking copies. One documented exception: a skip rule armed on an optimizer that is not
fused reads one flag per update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kept_transport import keep_messages
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8watch.training.attachment as attachment
from fp8watch.emulation import convert
from fp8watch.settings import Settings

WAITS = (
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.unique_consecutive.default,
    torch.ops.aten._unique2.default,
)  # fmt: skip


class NoSync(TorchDispatchMode):
    """Fails on what would wait for the device; counts what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.syncs: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if func in WAITS:
            self.syncs.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, policy: str) -> Iterator[tuple[Any, nn.Module, torch.optim.Optimizer]]:
    keep_messages(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = attachment.attach(model, optimizer, policy=policy, settings=Settings(report=False))
    yield watch, model, optimizer
    watch.detach()


def one_step(watch: Any, model: nn.Module, optimizer: torch.optim.Optimizer, mode: NoSync, *, clip: bool) -> None:
    """Only what is ours runs under the mode; the model's and the optimizer's own work is not our business."""
    batch = next(iter(watch.batches([torch.randn(8, 32)])))
    loss = model(batch).square().mean()
    loss.backward()
    original = watch._session.tap._original
    with mode:
        if clip:
            watch.clip_grad_norm_(model.parameters(), max_norm=1.0)
        before = watch._recorder.before_update(has_closure=False)
        watch._recorder.enter_update()
    if not before:
        original()
    with mode:
        watch._recorder.leave_update()
        watch._recorder.after_update(has_closure=False)
    optimizer.zero_grad()
    with mode:
        watch.micro_step(loss)
        watch.micro_step(loss)
        watch.step(loss)


@pytest.mark.parametrize("clip", [True, False])
def test_no_wait_in_a_watched_step(monkeypatch, clip):  # case: HOK-15
    with watched(monkeypatch, "observe") as (watch, model, optimizer):
        mode = NoSync()
        for _ in range(3):
            one_step(watch, model, optimizer, mode, clip=clip)
        assert mode.syncs == []
        assert mode.calls > 30
        assert watch.failures == {}
        assert len(watch._session.uplink._channel.frames) == 3


def test_an_armed_skip_rule_reads_one_flag_an_update(monkeypatch):  # case: HOK-15
    with watched(monkeypatch, "auto") as (watch, model, optimizer):
        mode = NoSync()
        for _ in range(3):
            one_step(watch, model, optimizer, mode, clip=True)
        assert mode.syncs == ["aten._local_scalar_dense.default"] * 3


def test_the_mode_sees_a_wait(monkeypatch):
    """The instrument itself: a source that reads one number is caught."""
    with watched(monkeypatch, "observe") as (watch, model, optimizer):
        source = watch._recorder._source
        read = source.read
        monkeypatch.setattr(source, "read", lambda: (source._amax.max().item(), read())[1])
        mode = NoSync()
        one_step(watch, model, optimizer, mode, clip=True)
        assert mode.syncs == ["aten._local_scalar_dense.default"]
