from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import TinyRun
from torch import nn

from fp8watch.actions.clip_control import ClipControl
from fp8watch.errors import ActionError


def with_gradients(seed: int, size: float) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2))]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * size
    return parameters


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
    st.sampled_from([1.0, 2.0, math.inf]),
    st.sampled_from([None, True, False]),
    st.one_of(st.none(), st.floats(1e-3, 1e3)),
)
def test_bit_identical_to_torch_for_the_same_limit(
    seed: int, size: float, user: float, norm_type: float, foreach: bool | None, ours: float | None
) -> None:
    expected, found = with_gradients(seed, size), with_gradients(seed, size)
    control = ClipControl(torch.optim.SGD(found, lr=0.1))
    control.set_limit(ours)
    limit = user if ours is None else min(user, ours)
    norm = torch.nn.utils.clip_grad_norm_(expected, limit, norm_type, foreach=foreach)
    assert torch.equal(control.clip_grad_norm_(iter(found), user, norm_type, foreach=foreach), norm)
    for a, b in zip(expected[:2], found[:2], strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
    reading = control.take()
    assert reading is not None
    assert torch.equal(reading.norm, norm)
    assert reading.limit == limit
    assert control.take() is None


def test_error_if_nonfinite_is_torchs() -> None:
    parameters = with_gradients(0, math.inf)
    control = ClipControl(torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(RuntimeError, match="non-finite"):
        control.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


def test_tighten_read_back_and_revert() -> None:
    run = TinyRun(fp8=False, clip=10.0)
    run.run(3)
    applied = run.apply("tighten_clip", max_norm=0.01)
    assert run.read_back("tighten_clip", applied).ok is None
    run.step()
    found = run.read_back("tighten_clip", applied)
    assert found.ok is True
    assert found.observed["limit"] == 0.01
    assert found.observed["norm_before"] > 0.01
    assert found.observed["norm_after"] == pytest.approx(0.01, rel=1e-3)
    run.actions["tighten_clip"].revert(applied)
    run.step()
    assert run.context.clip.last is not None
    assert run.context.clip.last.limit == 10.0
    assert not run.context.skip.is_armed


def test_where_the_loop_never_clips_we_do() -> None:
    run = TinyRun(fp8=False, clip=None)
    seen: list[float] = []
    run.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters()])))
    )
    run.run(2)
    assert run.context.clip.last is None
    applied = run.apply("tighten_clip", max_norm=0.01)
    run.run(2)
    assert seen[0] > 0.02
    assert seen[2:] == pytest.approx([0.01, 0.01], rel=1e-3)
    assert run.read_back("tighten_clip", applied).ok is True
    assert run.context.clip.user_limit is None


def test_scaled_gradients_of_a_fused_optimizer_are_clipped_by_their_true_norm() -> None:
    parameters = with_gradients(1, 1.0)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    true = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    for parameter in parameters[:2]:
        assert parameter.grad is not None
        parameter.grad.mul_(1024.0)
    optimizer.grad_scale = torch.tensor(1024.0)
    control = ClipControl(optimizer)
    control.set_limit(0.5)
    control.before_step()
    after = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) / 1024.0
    assert float(after) == pytest.approx(0.5, rel=1e-4)
    assert control.last is not None
    assert float(control.last.norm) == pytest.approx(float(true), rel=1e-5)
    assert control.norm_after is not None
    assert float(control.norm_after) == pytest.approx(0.5, rel=1e-4)


def test_a_limit_that_is_not_applied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(fp8=False, clip=10.0)
    run.run(2)
    applied = run.apply("tighten_clip", max_norm=0.01)
    monkeypatch.setattr(
        "fp8watch.actions.clip_control.torch_clip_grad_norm_",
        lambda parameters, *args: torch.nn.utils.get_total_norm([p.grad for p in parameters]),
    )
    run.step()
    found = run.read_back("tighten_clip", applied)
    assert found.ok is False
    assert "after clipping" in found.detail


def test_a_limit_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(fp8=False, clip=10.0)
    run.run(2)
    monkeypatch.setattr(run.context.clip, "set_limit", lambda limit: None)
    applied = run.apply("tighten_clip", max_norm=0.01)
    run.step()
    assert run.read_back("tighten_clip", applied).ok is False


def test_the_factor_is_of_the_limit_in_force_or_of_the_recent_norm() -> None:
    run = TinyRun(fp8=False, clip=1.0)
    run.step()
    assert run.apply("tighten_clip", factor=0.5).expected["limit"] == 0.5
    assert run.apply("tighten_clip", factor=0.5).expected["limit"] == 0.25
    unlimited = TinyRun(fp8=False, clip=math.inf)
    unlimited.run(3)
    median = sorted(unlimited.context.clip.recent_norms())[1]
    assert unlimited.apply("tighten_clip", factor=1.5).expected["limit"] == pytest.approx(1.5 * median)


def test_two_tightenings_are_undone_one_by_one() -> None:
    run = TinyRun(fp8=False, clip=1.0)
    run.step()
    first = run.apply("tighten_clip", max_norm=0.5)
    second = run.apply("tighten_clip", max_norm=0.1)
    run.actions["tighten_clip"].revert(second)
    assert run.context.clip.limit == 0.5
    assert run.context.skip.is_armed
    run.actions["tighten_clip"].revert(first)
    assert run.context.clip.limit is None


@pytest.mark.parametrize("params", [{}, {"max_norm": 0.0}, {"max_norm": 2.0}, {"max_norm": "1"}, {"factor": -1.0}])
def test_tighten_refuses_what_makes_no_sense(params: dict[str, Any]) -> None:
    run = TinyRun(fp8=False, clip=1.0)
    run.step()
    with pytest.raises(ActionError):
        run.apply("tighten_clip", **params)
    assert run.context.clip.limit is None


def spoil_with(run: TinyRun, value: float) -> None:
    def spoil() -> None:
        gradient = next(run.model.parameters()).grad
        assert gradient is not None
        gradient[0, 0] = value

    run.spoil = spoil


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e25])
def test_not_offered_while_the_norm_is_not_finite(value: float) -> None:
    # case: SPK-14
    run = TinyRun(fp8=False)
    run.run(5)
    spoil_with(run, value)
    run.step()
    with pytest.raises(ActionError, match="not finite"):
        run.apply("tighten_clip", max_norm=0.1)
    assert run.context.clip.limit is None


def test_the_norms_of_the_case_are_refused_at_the_nan_and_not_before() -> None:
    # case: SPK-14
    run = TinyRun(fp8=False, clip=None)
    control = run.context.clip
    parameters = list(run.model.parameters())

    def clip_at(norm: float) -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        next(run.model.parameters()).grad[0, 0] = norm  # type: ignore[index]
        control.clip_grad_norm_(parameters, 10.0)

    for norm in (4.0, 5e3, 2e8):
        clip_at(norm)
        applied = run.apply("tighten_clip", max_norm=1.0)
        run.actions["tighten_clip"].revert(applied)
    clip_at(math.nan)
    with pytest.raises(ActionError, match="not finite"):
        run.apply("tighten_clip", max_norm=1.0)


def test_with_our_limit_in_force_a_norm_that_is_not_finite_skips_the_step() -> None:  # case: SPK-15
    run = TinyRun(fp8=False, clip=10.0)
    run.run(3)
    run.apply("tighten_clip", max_norm=0.5)
    run.step()
    spoil_with(run, 1e25)  # finite, but its norm is not: torch would make every gradient 0
    before = [parameter.clone() for parameter in run.model.parameters()]
    run.step()
    assert run.context.skip.last_skipped is True
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_the_share_of_clipped_steps_is_counted() -> None:
    run = TinyRun(fp8=False, clip=10.0)
    run.run(2)
    assert run.context.clip.clipped_ratio() is None
    norm = run.context.clip.recent_norms()[-1]
    run.apply("tighten_clip", max_norm=norm * 0.01)
    run.run(4)
    assert run.context.clip.clipped_ratio() == 1.0
    run.context.clip.set_limit(norm * 100.0)
    run.run(4)
    assert run.context.clip.clipped_ratio() == 0.0


def total(parameters: Iterable[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


@pytest.mark.parametrize("what", ["some only", "in two calls", "changed after", "replaced after", "others"])
def test_what_the_optimizer_gets_is_below_the_limit_whatever_the_loop_clips(what: str) -> None:
    parameters = with_gradients(3, 10.0)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    control = ClipControl(optimizer)
    control.set_limit(0.5)
    if what == "some only":
        control.clip_grad_norm_(parameters[:1], 1e9)
    elif what == "in two calls":
        control.clip_grad_norm_(parameters[:1], 1e9)
        control.clip_grad_norm_(parameters[1:], 1e9)
    elif what == "others":
        control.clip_grad_norm_(with_gradients(4, 1.0), 1e9)
    else:
        control.clip_grad_norm_(parameters, 1e9)
        assert parameters[1].grad is not None
        if what == "changed after":
            parameters[1].grad.add_(100.0)
        else:
            parameters[1].grad = torch.full_like(parameters[1], 100.0)
    assert total(parameters) > 0.6
    control.before_step()
    assert total(parameters) == pytest.approx(0.5, rel=1e-3)
    assert control.norm_after is not None
    assert float(control.norm_after) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_clip_of_all_of_them_is_left_as_it_is(norm_type: float) -> None:
    parameters = with_gradients(3, 10.0)
    control = ClipControl(torch.optim.SGD(parameters, lr=0.1))
    control.set_limit(0.5)
    control.clip_grad_norm_(parameters, 1e9, norm_type)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    control.before_step()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, parameters[:2], strict=True))  # type: ignore[arg-type]
    assert control.calls == 1
    assert float(control.norm_after) == pytest.approx(0.5, rel=1e-3)  # type: ignore[arg-type]


def test_without_a_limit_nothing_is_looked_at_or_held() -> None:
    parameters = with_gradients(3, 10.0)
    control = ClipControl(torch.optim.SGD(parameters, lr=0.1))
    control.clip_grad_norm_(parameters[:1], 1.0)
    assert control.take_covers() == []
    before = total(parameters)
    control.before_step()
    assert total(parameters) == before
    assert control.norm_after is None


def test_a_limit_that_the_optimizer_does_not_see_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(fp8=False, clip=10.0)
    run.run(2)
    applied = run.apply("tighten_clip", max_norm=0.01)
    monkeypatch.setattr("fp8watch.actions.clip_control.clip_grads_with_norm_", lambda *args: None)
    own_clip = run.context.clip.clip_grad_norm_
    monkeypatch.setattr(
        run.context.clip, "clip_grad_norm_", lambda parameters, limit: own_clip(list(parameters)[:1], limit)
    )
    run.step()
    assert run.read_back("tighten_clip", applied).ok is False


def test_a_clip_that_fails_is_unavailable_and_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(fp8=False, clip=None)
    applied = run.apply("tighten_clip", max_norm=0.01)
    monkeypatch.setattr("fp8watch.actions.clip_control.get_total_norm", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.step()
    assert run.read_back("tighten_clip", applied).ok is False
    assert "division by zero" in (run.actions["tighten_clip"].unavailable() or "")


def test_with_a_closure_what_the_optimizer_got_is_measured() -> None:
    parameters = with_gradients(3, 10.0)
    control = ClipControl(torch.optim.SGD(parameters, lr=0.1))
    control.set_limit(0.5)
    control.clip_grad_norm_(parameters[:1], 1e9)  # inside the closure, of some only
    control.after_closure()
    assert float(control.norm_after) > 1.0  # type: ignore[arg-type]
