"""A warm-up that is learnt from the learning rates seen, of schedules that are not asked for those of other steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import TinyRun

from fp8watch.actions.lr_curve import LrCurve
from fp8watch.actions.lr_rules import Stretch
from fp8watch.actions.lr_seen import LEAST_RISES, SeenCurve, SeenStretch
from fp8watch.errors import ActionError


def warmup_cosine(step: int, *, peak: int, steps: int) -> float:
    if step < peak:
        return (step + 1) / (peak + 1)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - peak) / (steps - peak))))


class Opaque:
    """A schedule with state of its own, so that nobody but the scheduler may call it."""

    def __init__(self, peak: int = 14, steps: int = 60) -> None:
        self.peak, self.steps, self.calls = peak, steps, 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return warmup_cosine(step, peak=self.peak, steps=self.steps)


def effective(run: TinyRun) -> list[float]:
    return [float(lr) for lr in run.context.lr.effective]


def test_the_warm_up_of_a_schedule_with_state_is_learnt_and_walked_more_slowly() -> None:
    """The LRs are those of the same schedule given as a function that may be run ahead, and nobody calls it for us."""
    opaque = Opaque()
    run = TinyRun(schedule=opaque)
    known = TinyRun(schedule=lambda step: warmup_cosine(step, peak=14, steps=60))
    action = run.actions["lengthen_warmup"]
    assert "not run ahead" in (action.unavailable() or "")
    for _ in range(LEAST_RISES + 1):
        run.step()
        known.step()
    assert (action.unavailable(), action.is_warming_up, action.warmup_steps) == (None, True, None)
    applied = run.apply("lengthen_warmup", stretch=3.0)
    known.apply("lengthen_warmup", stretch=3.0)
    calls, lowered = opaque.calls, 0
    for done in range(24):
        run.step()
        known.step()
        assert effective(run) == pytest.approx(effective(known), rel=1e-6), done
        lowered += effective(run)[0] < 0.99 * float(run.context.lr.scheduled[0])
        if done == 2:
            assert run.read_back("lengthen_warmup", applied).ok is True
    assert opaque.calls == calls + 2 * 24  # once a step and group, by the scheduler
    assert lowered > 8
    assert (action.warmup_steps, action.is_warming_up) == (14, False)
    assert "ended at step 14" in (action.unavailable() or "")


def test_a_silent_no_op_is_caught_and_a_revert_gives_the_schedule_back() -> None:
    run = TinyRun(schedule=Opaque())
    for _ in range(LEAST_RISES + 1):
        run.step()
    applied = run.apply("lengthen_warmup", stretch=2.0)
    run.step()
    assert run.read_back("lengthen_warmup", applied).ok is None  # at t0 nothing differs
    run.step()
    assert run.read_back("lengthen_warmup", applied).ok is True
    assert effective(run)[0] < float(run.context.lr.scheduled[0])
    run.context.lr.enter = lambda: None  # type: ignore[method-assign]
    run.step()
    assert run.read_back("lengthen_warmup", applied).ok is False
    del run.context.lr.enter
    run.actions["lengthen_warmup"].revert(applied)
    run.step()
    assert effective(run) == [float(lr) for lr in run.context.lr.scheduled]


def test_what_was_seen_before_a_rollback_holds_after_it(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, schedule=Opaque(peak=30), every=5)
    for _ in range(12):
        run.step()
    run.apply("lengthen_warmup", stretch=2.0)
    first = {}
    for _ in range(8):
        run.step()
        first[run.context.lr.last_position] = effective(run)
    run.apply("rollback", checkpoint="step-00000015-attempt-0", changes=[])
    again = {}
    for _ in range(5):
        run.step()
        again[run.context.lr.last_position] = effective(run)
    assert set(again) == set(range(15, 20))
    assert all(values == pytest.approx(first[position]) for position, values in again.items())


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (lambda step: 1.0, "has not risen"),
        (lambda step: 1.0 / (step + 1), "has not risen"),
        (lambda step: min(1.0, (step + 1) / 4), "has not risen"),  # too short to be told from chance
    ],
)
def test_schedules_without_a_warm_up(schedule: object, why: str) -> None:
    seen = SeenCurve()
    for position in range(20):
        seen.note(position, [float(schedule(position))])  # type: ignore[operator]
    assert (seen.warmup_steps, seen.is_rising) == (0, False)
    assert why in (seen.why_not() or "")


def test_a_beginning_that_was_not_seen_is_said() -> None:
    seen = SeenCurve()
    for position in range(100, 130):
        seen.note(position, [position / 1000])
    assert "first seen" in (seen.why_not() or "")


def test_a_rate_on_a_device_is_never_read() -> None:
    seen = SeenCurve()
    seen.note(0, [torch.empty((), device="meta")])
    assert "on a device" in (seen.why_not() or "")


def test_without_a_scheduler_nothing_is_learnt() -> None:
    run = TinyRun(schedule=Opaque())
    run.context.parts.scheduler = None
    run.context.lr._scheduler = None
    from fp8watch.actions.lengthen_warmup import LengthenWarmup

    run.context.lr.seen = None
    action = LengthenWarmup(run.context)
    assert (run.context.lr.seen, action.unavailable()) == (None, "attach got no lr_scheduler")
    with pytest.raises(ActionError):
        action.apply(1, {})


@given(st.integers(8, 40), st.integers(1, 30), st.floats(1.1, 5.0))
def test_the_walk_is_the_one_along_the_schedule_itself(peak: int, start: int, stretch: float) -> None:
    """Held against the factors of a schedule that is known from the beginning, at every position until both meet."""
    start = min(start, peak - 1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (peak + 1), total_iters=peak)
    curve, seen = LrCurve(scheduler, optimizer), SeenCurve()
    factors = []
    for ahead in range(int((peak - start) * stretch) + 1):
        slow, fast = curve.between(start + ahead / stretch), curve.at(start + ahead)
        if ahead and slow[0] >= fast[0] * (1 - 1e-12):
            break
        factors.append((slow[0] / fast[0],))
    wanted = Stretch(start=start, factors=tuple(factors))
    rule: SeenStretch | None = None
    for position in range(start + len(factors) + 10):
        lr = curve.at(position)[0]
        seen.note(position, [lr])
        if position == start:
            rule = SeenStretch(seen, start=start, stretch=stretch)
        if rule is not None:
            given_ = rule.transform(lr, group=0, update=position, position=position)
            assert given_ == pytest.approx(wanted.transform(lr, group=0, update=position, position=position), rel=1e-9)
    assert rule is not None
    assert rule.meets_at == start + len(factors)
