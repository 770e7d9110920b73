from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import TinyRun, same
from torch.optim import lr_scheduler as schedulers

from fp8watch.actions.lr_control import LrControl
from fp8watch.actions.lr_curve import LrCurve
from fp8watch.actions.lr_rules import Hold, Rewarm, Stretch
from fp8watch.errors import ActionError

KINDS = ["sgd", "foreach", "fused", "tensor"]


def effective(run: TinyRun) -> float:
    found = run.context.lr.effective_lr()
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_factor_is_only_there_during_the_step(kind: str) -> None:
    run = TinyRun(kind=kind)
    run.run(10)
    objects = [group["lr"] for group in run.optimizer.param_groups]
    seen: list[float] = []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append(float(run.optimizer.param_groups[1]["lr"])))
    run.apply("hold_lr", factor=0.25)
    run.step()
    assert seen == [pytest.approx(0.25e-2)]
    assert run.lrs() == pytest.approx([1e-2, 1e-2])
    if kind == "tensor":
        assert all(a is b["lr"] for a, b in zip(objects, run.optimizer.param_groups, strict=True))
    assert run.scheduler.get_last_lr() == pytest.approx([1e-2, 1e-2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_factor_equals_training_with_a_lower_schedule(kind: str) -> None:
    lower = TinyRun(fp8=False, kind=kind, schedule=lambda step: 0.25)
    lower.run(8)
    held = TinyRun(fp8=False, kind=kind, schedule=lambda step: 1.0)
    held.apply("hold_lr", factor=0.25)
    held.run(8)
    for a, b in zip(lower.model.parameters(), held.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    untouched = TinyRun(fp8=False, kind=kind, schedule=lambda step: 1.0)
    untouched.run(8)
    assert not torch.allclose(next(untouched.model.parameters()), next(held.model.parameters()))


def test_no_rule_and_factor_one_touch_nothing() -> None:
    plain = TinyRun(fp8=False)
    plain.run(6)
    held = TinyRun(fp8=False)
    held.apply("hold_lr", factor=1.0)
    objects = [group["lr"] for group in held.optimizer.param_groups]
    held.context.lr.enter()
    assert all(a is b["lr"] for a, b in zip(objects, held.optimizer.param_groups, strict=True))
    held.context.lr.leave()
    held.run(6)
    assert plain.losses == held.losses


def test_the_lr_is_put_back_when_the_step_raises() -> None:
    run = TinyRun(fp8=False)
    run.apply("hold_lr", factor=0.5)
    before = [group["lr"] for group in run.optimizer.param_groups]

    def explode(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = run.optimizer.register_step_pre_hook(explode)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.step()
    handle.remove()
    assert all(a is b["lr"] for a, b in zip(before, run.optimizer.param_groups, strict=True))


def test_checkpoints_and_schedulers_never_see_the_factor() -> None:
    run = TinyRun(fp8=False, schedule=lambda step: 1.0 / (step + 1))
    twin = TinyRun(fp8=False, schedule=lambda step: 1.0 / (step + 1))
    run.apply("hold_lr", factor=0.1)
    run.run(5)
    twin.run(5)
    assert run.lrs() == twin.lrs()
    assert same(run.scheduler.state_dict(), twin.scheduler.state_dict())
    assert run.optimizer.state_dict()["param_groups"] == twin.optimizer.state_dict()["param_groups"]


# hold_lr


def test_hold_by_factor_ends_after_its_steps_and_restores_linearly() -> None:
    run = TinyRun(fp8=False, schedule=lambda step: 1.0)
    applied = run.apply("hold_lr", factor=0.2, steps=3, restore_steps=3)
    assert run.read_back("hold_lr", applied).ok is None
    seen = []
    for _ in range(8):
        run.step()
        seen.append(effective(run))
        assert run.read_back("hold_lr", applied).ok is True
    assert seen == pytest.approx([0.002, 0.002, 0.002, 0.004, 0.006, 0.008, 0.01, 0.01])


def test_a_jump_of_the_schedule_is_held_at_the_level_before_and_let_go_afterwards() -> None:
    def jumps(step: int) -> float:
        return 30.0 if 10 <= step < 30 else (0.5 if step >= 34 else 1.0)

    run = TinyRun(fp8=False, schedule=jumps)
    run.run(12)
    assert effective(run) == pytest.approx(0.3)
    applied = run.apply("hold_lr", to_lr=0.01, steps=5)
    seen = []
    for _ in range(30):
        run.step()
        seen.append(effective(run))
    assert max(seen) == pytest.approx(0.01)
    assert seen[-1] == pytest.approx(0.005)  # a ceiling lifts nothing
    found = run.read_back("hold_lr", applied)
    assert found.ok is True
    run.actions["hold_lr"].revert(applied)
    assert not run.context.lr.rules


def test_a_level_holds_through_a_rollback_that_makes_the_fault_recur(tmp_path: Any) -> None:
    run = TinyRun(tmp_path, fp8=False, schedule=lambda step: 30.0 if 10 <= step < 20 else 1.0)
    assert run.manager is not None
    run.run(8)
    record = run.manager.save(8)
    run.run(4)
    run.apply("hold_lr", to_lr=0.01, steps=50)
    run.apply("rollback", checkpoint=record.checkpoint)
    seen = []
    for _ in range(15):
        run.step()
        seen.append(effective(run))
    assert seen == pytest.approx([0.01] * 15)


def test_a_group_without_lr_does_not_let_a_jump_through() -> None:
    rule = Hold(begin=0, steps=1, ceilings=[0.0, 1.0])
    for update in range(4):
        assert [rule.transform(lr, group=g, update=update, position=None) for g, lr in enumerate((0.0, 30.0))] == [0, 1]
    assert [rule.transform(lr, group=g, update=4, position=None) for g, lr in enumerate((0.0, 1.0))] == [0, 1]
    assert [rule.transform(lr, group=g, update=5, position=None) for g, lr in enumerate((0.0, 2.0))] == [0, 2]


def test_a_level_is_shared_out_to_the_groups() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.1}])
    control = LrControl(optimizer)
    control.add("x", Hold(begin=0, steps=None, ceilings=[0.5 * w for w in control.group_weights()]))
    model(torch.ones(1, 2)).sum().backward()
    control.enter()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])
    control.leave()
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]


@pytest.mark.parametrize(
    "params", [{}, {"factor": 2.0}, {"factor": "0.5"}, {"factor": True}, {"to_lr": -1.0}, {"factor": 0.5, "steps": 0}]
)
def test_hold_refuses_what_it_cannot_do(params: dict[str, Any]) -> None:
    run = TinyRun(fp8=False)
    with pytest.raises(ActionError):
        run.apply("hold_lr", **params)
    assert not run.context.lr.rules


def test_revert_of_a_hold_restores_over_its_restore_steps() -> None:
    run = TinyRun(fp8=False, schedule=lambda step: 1.0)
    applied = run.apply("hold_lr", factor=0.5, restore_steps=1)
    run.run(2)
    run.actions["hold_lr"].revert(applied)
    run.step()
    assert effective(run) == pytest.approx(0.0075)
    run.step()
    assert effective(run) == pytest.approx(0.01)


# rewarm


@given(st.integers(1, 50), st.floats(0.0, 0.99))
def test_rewarm_rises_from_start_to_one_and_never_above(steps: int, start: float) -> None:
    rule = Rewarm(begin=3, steps=steps, start_factor=start)
    lrs = [float(rule.transform(1.0, group=0, update=3 + k, position=None)) for k in range(steps + 2)]
    assert lrs[0] == pytest.approx(start)
    assert lrs == sorted(lrs)
    assert lrs[steps] == lrs[steps + 1] == 1.0
    steps_up = [b - a for a, b in itertools.pairwise(lrs[: steps + 1])]
    assert steps_up == pytest.approx([(1 - start) / steps] * steps)


def test_rewarm_in_a_run_and_its_revert() -> None:
    run = TinyRun(fp8=False, schedule=lambda step: 1.0)
    run.run(2)
    applied = run.apply("rewarm", steps=4, start_factor=0.0)
    seen = []
    for _ in range(3):
        run.step()
        seen.append(effective(run))
        assert run.read_back("rewarm", applied).ok is True
    assert seen == pytest.approx([0.0, 0.0025, 0.005])
    run.actions["rewarm"].revert(applied)
    run.step()
    assert effective(run) == pytest.approx(0.01)


# lengthen_warmup


def test_the_warmup_is_walked_more_slowly_until_both_meet() -> None:
    run = TinyRun(peak_at=20)  # LR at position t is (t + 1) / 20 of the peak
    run.run(4)
    applied = run.apply("lengthen_warmup", stretch=3.0)
    seen = []
    for _ in range(60):
        run.step()
        seen.append(effective(run))
    expected = [min(1.0, (4 + k / 3 + 1) / 20) * 1e-2 for k in range(60)]
    assert seen == pytest.approx(expected)
    assert applied.expected["meets_at"] == 4 + 15 * 3
    assert run.lrs() == pytest.approx([1e-2, 1e-2])


def test_it_is_read_back_where_it_makes_a_difference() -> None:
    run = TinyRun(fp8=False, peak_at=20)
    run.run(4)
    applied = run.apply("lengthen_warmup", stretch=2.0)
    run.step()
    assert run.read_back("lengthen_warmup", applied).ok is None
    run.step()
    found = run.read_back("lengthen_warmup", applied)
    assert found.ok is True
    assert found.observed["factor"] == pytest.approx(5.5 / 6)
    run.actions["lengthen_warmup"].revert(applied)
    run.step()
    assert run.context.lr.factor() == 1.0
    assert run.read_back("lengthen_warmup", applied).ok is False


def test_after_the_warmup_and_without_one_it_is_unavailable() -> None:
    run = TinyRun(fp8=False, peak_at=6)
    assert run.actions["lengthen_warmup"].unavailable() is None
    run.run(6)
    assert "ended at step 5" in (run.actions["lengthen_warmup"].unavailable() or "")
    with pytest.raises(ActionError, match="rewarm"):
        run.apply("lengthen_warmup", stretch=2.0)
    flat = TinyRun(fp8=False, schedule=lambda step: 1.0)
    assert "no warm-up" in (flat.actions["lengthen_warmup"].unavailable() or "")


class OwnScheduler:
    """A scheduler that is nobody's subclass and changes LRs by multiplying what it finds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.last_epoch = 0

    def step(self) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 1.1 if self.last_epoch < 10 else 0.99


def make_scheduler(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "linear":
        return schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    if kind == "sequential":
        up = schedulers.LinearLR(optimizer, start_factor=0.01, total_iters=10)
        down = schedulers.CosineAnnealingLR(optimizer, T_max=40)
        return schedulers.SequentialLR(optimizer, [up, down], milestones=[10])
    if kind == "lambda":
        return schedulers.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 11))
    if kind == "one_cycle":
        return schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=40, pct_start=0.25)
    if kind == "chained":
        up = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=10)
        return schedulers.ChainedScheduler([up, schedulers.ExponentialLR(optimizer, gamma=0.999)])
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["linear", "sequential", "lambda", "one_cycle", "chained"])
def test_the_curve_is_what_the_live_scheduler_will_do_and_leaves_it_alone(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = make_scheduler(kind, optimizer)
    before = copy.deepcopy(
        {k: v for k, v in vars(scheduler).items() if not k.startswith("_sched") and k != "optimizer"}
    )
    objects = [group["lr"] for group in optimizer.param_groups]
    if kind == "chained":
        scheduler.last_epoch = 0  # torch's own has none
    curve = LrCurve(scheduler, optimizer)
    assert curve.unavailable is None
    predicted = [curve.at(position)[0] for position in range(30)]
    assert all(a is b["lr"] for a, b in zip(objects, optimizer.param_groups, strict=True))
    for name, value in before.items():
        if name not in ("lr_lambdas", "last_epoch"):
            assert same(vars(scheduler)[name], value), name
    actual = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(30):
            actual.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    assert predicted == pytest.approx(actual, rel=1e-9)
    assert curve.warmup_steps == {"linear": 10, "sequential": 10, "lambda": 10, "one_cycle": 9, "chained": 10}[kind]


def test_a_scheduler_that_cannot_be_evaluated_is_unavailable_with_the_reason() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    scheduler = schedulers.LinearLR(optimizer, start_factor=0.1)
    scheduler.model = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    scheduler._get_closed_form_lr = None  # type: ignore[assignment]
    assert "methods were replaced" in (LrCurve(scheduler, optimizer).unavailable or "")
    chained = schedulers.ChainedScheduler([schedulers.LinearLR(optimizer, start_factor=0.1)])
    chained.last_epoch, chained.model = 0, torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    assert "holds a model" in (LrCurve(chained, optimizer).unavailable or "")
    assert "OwnScheduler is not run ahead" in (LrCurve(OwnScheduler(optimizer), optimizer).unavailable or "")
    assert LrCurve(None, optimizer).unavailable == "attach got no lr_scheduler"
    plateau = schedulers.ReduceLROnPlateau(optimizer)
    assert LrCurve(plateau, optimizer).unavailable is not None


def test_a_compiled_step_with_a_float_lr_is_unavailable() -> None:
    run = TinyRun(fp8=False)
    assert run.context.lr.unavailable() is None
    run.optimizer.step._torchdynamo_orig_callable = None  # type: ignore[attr-defined]  # the mark torch.compile leaves
    assert "compiled" in (run.actions["hold_lr"].unavailable() or "")


# A silent no-op is caught


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("hold_lr", {"factor": 0.5}),
        ("hold_lr", {"to_lr": 1e-4}),
        ("rewarm", {"steps": 50, "start_factor": 0.1}),
        ("lengthen_warmup", {"stretch": 4.0}),
    ],
)
def test_an_lr_that_is_not_put_in_is_noticed(
    name: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyRun(peak_at=50, fp8=False)
    run.run(4)
    applied = run.apply(name, **params)
    run.run(2)
    assert run.read_back(name, applied).ok is True
    real = LrControl.enter

    def does_not_arrive(self: LrControl) -> None:
        real(self)
        for group, _, saved in self._put:
            group["lr"] = saved
        self._put = []

    monkeypatch.setattr(LrControl, "enter", does_not_arrive)
    run.run(2)
    found = run.read_back(name, applied)
    assert found.ok is False
    assert "was asked for" in found.detail


def test_an_optimizer_that_sets_its_own_lr_is_noticed_and_left_alone() -> None:
    run = TinyRun(fp8=False)
    run.run(10)
    applied = run.apply("hold_lr", factor=0.5)
    run.optimizer.register_step_pre_hook(lambda *_: run.optimizer.param_groups[0].update(lr=0.123))
    run.context.lr.enter()
    run.optimizer.step()
    run.context.lr.leave()
    assert run.lrs() == [0.123, pytest.approx(0.01)]
    assert run.read_back("hold_lr", applied).ok is False


def test_stretch_is_stateless_in_position() -> None:
    rule = Stretch(start=5, factors=((1.0,), (0.5,)))
    assert [rule.transform(1.0, group=0, update=0, position=p) for p in (4, 5, 6, 7, None)] == [1, 1, 0.5, 1, 1]
