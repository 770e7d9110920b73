from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_run import TinyRun, clone, same
from torch import nn

from fp8watch.actions.clip_control import ClipControl
from fp8watch.actions.skip_guard import SkipGuard
from fp8watch.errors import ActionError


def spoil(run: TinyRun, value: float = math.nan) -> None:
    def put() -> None:
        gradient = next(run.model.parameters()).grad
        assert gradient is not None
        gradient[0, 0] = value

    run.spoil = put


def state(run: TinyRun) -> Any:
    return clone([dict(run.model.named_parameters()), run.optimizer.state_dict()["state"]])


# case: SPK-14
@pytest.mark.parametrize("kind", ["sgd", "foreach", "fused", "tensor"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_parameters_moments_and_counter_stay(kind: str, value: float, clip: float | None) -> None:
    run = TinyRun(fp8=False, kind=kind, clip=clip)
    run.apply("skip_update")
    run.run(3)
    before = state(run)
    spoil(run, value)
    run.step()
    assert run.context.skip.last_skipped is True
    assert same(before, state(run))
    run.spoil = None
    run.step()
    assert run.context.skip.last_skipped is False
    assert not same(before, state(run))


def test_disarmed_it_lets_everything_through() -> None:
    run = TinyRun(fp8=False)
    run.run(2)
    spoil(run)
    run.step()
    assert not bool(torch.isfinite(next(run.model.parameters())).all())


def test_a_guard_that_does_nothing_lets_the_parameters_be_spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(fp8=False)
    applied = run.apply("skip_update")
    monkeypatch.setattr(run.context.skip, "before_step", lambda: False)
    run.run(3)
    assert run.read_back("skip_update", applied).ok is None  # never asked: never confirmed


def test_read_back_and_revert() -> None:
    run = TinyRun(fp8=False)
    applied = run.apply("skip_update", max_consecutive=2)
    assert run.read_back("skip_update", applied).ok is None
    run.step()
    assert run.read_back("skip_update", applied).ok is True
    run.actions["skip_update"].revert(applied)
    assert not run.context.skip.is_armed
    assert run.context.skip.max_in_a_row == 3
    assert run.read_back("skip_update", applied).ok is False


def test_after_so_many_in_a_row_it_lets_go_and_says_so() -> None:
    run = TinyRun(fp8=False)
    run.apply("skip_update", max_consecutive=2)
    run.run(2)
    spoil(run)
    run.run(2)
    assert run.context.skip.total == 2
    assert not run.context.skip.is_limit_reached
    run.step()
    assert run.context.skip.is_limit_reached
    assert run.context.skip.last_skipped is False
    assert run.context.skip.total == 2


def test_a_finite_update_starts_the_count_again() -> None:
    run = TinyRun(fp8=False)
    run.apply("skip_update", max_consecutive=1)
    for _ in range(3):
        spoil(run)
        run.step()
        assert run.context.skip.last_skipped is True
        run.spoil = None
        run.step()
    assert run.context.skip.total == 3


def test_an_update_it_was_not_asked_about_does_not_count_as_left_out() -> None:
    run = TinyRun(fp8=False)
    run.apply("skip_update")
    spoil(run)
    run.step()
    assert run.context.skip.last_skipped is True
    run.context.skip.after_step()  # the core does not ask while it is disarmed
    assert run.context.skip.last_skipped is False


def test_gradients_outside_the_clip_are_looked_at_too() -> None:
    clipped, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([clipped, other], lr=0.1)
    clip = ClipControl(optimizer)
    guard = SkipGuard(optimizer, clip)
    guard.arm("test")
    clipped.grad, other.grad = torch.ones(2), torch.tensor([1.0, math.nan])
    clip.clip_grad_norm_([clipped], 1.0)
    assert guard.before_step() is True
    other.grad = torch.ones(2)
    clip.clip_grad_norm_([clipped], 1.0)
    assert guard.before_step() is False


def test_sparse_gradients_and_none_at_all() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    guard = SkipGuard(optimizer)
    guard.arm("test")
    assert guard.before_step() is False
    (embedding(torch.tensor([1, 1])) * math.nan).sum().backward()
    assert guard.before_step() is True


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_on_device_the_fused_kernel_leaves_it_out(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """`found_inf` works alike on CPU tensors, so the device path is run here."""
    parameter = nn.Parameter(torch.ones(4))
    extra = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    optimizer = optimizer_class([parameter], lr=0.1, fused=True, **extra)  # type: ignore[call-arg]
    guard = SkipGuard(optimizer, on_device=True, max_in_a_row=2)
    guard.arm("test")

    def step(value: float) -> float:
        parameter.grad = torch.full((4,), value)
        asked = guard.before_step()
        try:
            if not asked:
                optimizer.step()
        finally:
            guard.after_step()
        assert not hasattr(optimizer, "found_inf")
        return float(guard.last_skipped)

    assert step(1.0) == 0.0
    before = clone([parameter, optimizer.state_dict()["state"]])
    assert step(math.nan) == 1.0
    assert step(math.inf) == 1.0
    assert isinstance(guard.last_skipped, torch.Tensor)
    assert same(before, clone([parameter, optimizer.state_dict()["state"]]))
    assert float(guard.total) == 2.0
    assert step(1.0) == 0.0
    assert step(math.nan) == 1.0
    assert step(math.nan) == 1.0
    assert step(math.nan) == 0.0  # lets go after two in a row
    assert step(math.nan) == 0.0


def test_the_first_step_of_fused_sgd_with_momentum_is_decided_on_the_host() -> None:
    """Its kernel would leave uninitialised momentum behind."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    guard = SkipGuard(optimizer, on_device=True)
    guard.arm("test")
    parameter.grad = torch.full((4,), math.nan)
    assert guard.before_step() is True
    guard.after_step()
    assert not optimizer.state


def test_with_a_grad_scaler_it_is_the_scalers_business() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    run = TinyRun(fp8=False, scaler=scaler)
    assert "GradScaler" in (run.actions["skip_update"].unavailable() or "")
    with pytest.raises(ActionError):
        run.apply("skip_update")
    disabled = TinyRun(fp8=False, scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert disabled.actions["skip_update"].unavailable() is None


def test_a_decision_of_a_grad_scaler_is_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    guard = SkipGuard(optimizer, on_device=True)
    guard.arm("test")
    parameter.grad = torch.full((4,), math.nan)
    theirs = torch.tensor(1.0)
    optimizer.found_inf = theirs
    assert guard.before_step() is False
    guard.after_step()
    assert optimizer.found_inf is theirs


def clipped_pair() -> tuple[nn.Parameter, nn.Parameter, ClipControl, SkipGuard]:
    parameters = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    clip = ClipControl(optimizer)
    guard = SkipGuard(optimizer, clip)
    guard.arm("test")
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return *parameters, clip, guard


def test_a_clip_of_as_many_other_gradients_proves_nothing() -> None:
    first, _, clip, guard = clipped_pair()
    others = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for other in others:
        other.grad = torch.ones(2)
    assert first.grad is not None
    first.grad[0] = math.nan
    clip.clip_grad_norm_(others, 1.0)
    assert guard.before_step() is True


def test_a_clip_of_others_that_is_not_finite_leaves_nothing_out() -> None:
    *_, clip, guard = clipped_pair()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), math.nan)
    clip.clip_grad_norm_([other], 1.0)
    assert guard.before_step() is False


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_gradients_that_became_nan_after_the_clip_are_seen(how: str) -> None:
    first, second, clip, guard = clipped_pair()
    clip.clip_grad_norm_([first, second], 1.0)
    if how == "in place":
        assert second.grad is not None
        second.grad[1] = math.nan
    else:
        second.grad = torch.tensor([math.nan, 1.0])
    assert guard.before_step() is True


def test_the_norm_of_the_clip_is_used_where_it_is_of_these_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, clip, guard = clipped_pair()
    clip.clip_grad_norm_([first, second], 1.0)

    def measured(*args: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("fp8watch.actions.skip_guard.total_norm", measured)
    assert guard.before_step() is False
    with pytest.raises(AssertionError, match="again"):
        guard.before_step()  # a clip tells about one update


def test_a_parameter_without_elements_does_not_blind_it() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(0))
    guard = SkipGuard(torch.optim.SGD([first, second], lr=0.1))
    guard.arm("test")
    first.grad, second.grad = torch.tensor([1.0, math.nan]), torch.empty(0)
    assert guard.before_step() is True
    first.grad = None
    assert guard.before_step() is False


def test_a_guard_that_fails_is_unavailable_and_never_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(fp8=False, clip=None)
    applied = run.apply("skip_update")
    with monkeypatch.context() as patch:
        patch.setattr("fp8watch.actions.skip_guard.total_norm", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.step()
    found = run.read_back("skip_update", applied)
    assert found.ok is False
    assert "division by zero" in found.detail
    assert "division by zero" in (run.actions["skip_update"].unavailable() or "")
    run.optimizer.zero_grad()
    run.step()
    assert run.actions["skip_update"].unavailable() is None


def test_a_scaler_that_cannot_say_whether_it_is_enabled_counts_as_enabled() -> None:
    class Scaler:
        def get_scale(self) -> float:
            return 1.0

    guard = SkipGuard(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), scaler=Scaler())
    assert "GradScaler" in (guard.unavailable() or "")
