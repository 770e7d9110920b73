"""No schedule that has state of its own is asked for the LR of another step."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from fp8watch.actions.lr_curve import LrCurve
from fp8watch.demo.schedule import schedule as demo_schedule

CALLS: list[int] = []
TOTAL = 0


def factor(step: int, *, warmup: int, scale: float = 1.0) -> float:
    if step < 0:
        raise ValueError(f"step {step}")
    return scale * min(1.0, (step + 1) / (warmup + 1)) * abs(math.cos(0.0))


@dataclass(frozen=True)
class Frozen:
    warmup: int

    def __call__(self, step: int) -> float:
        return factor(step, warmup=self.warmup)


def counting_globally(step: int) -> float:
    global TOTAL
    TOTAL += 1
    return 1.0 / TOTAL


def listed(step: int) -> float:
    CALLS.append(step)
    return 1.0 / len(CALLS)


class Callable_:
    calls = 0

    def __call__(self, step: int) -> float:
        Callable_.calls += 1
        return 1.0 / Callable_.calls


@dataclass(frozen=True)
class Unfrozen:
    held: list[int]

    def __call__(self, step: int) -> float:
        self.held.append(step)
        return 1.0 / len(self.held)


def closure(warmup: int) -> Callable[[int], float]:
    return lambda step: factor(step, warmup=warmup)


def nonlocal_count() -> Callable[[int], float]:
    count = 0

    def function(step: int) -> float:
        nonlocal count
        count += 1
        return 1.0 / count

    return function


def list_in_closure() -> Callable[[int], float]:
    held = [0]

    def function(step: int) -> float:
        held[0] += 1
        return 1.0 / held[0]

    return function


def list_in_default(step: int, held: list[int] = []) -> float:  # noqa: B006
    held += [step]
    return 1.0 / len(held)


def from_generator() -> Callable[[int], float]:
    numbers = itertools.count(1)
    return lambda step: 1.0 / next(numbers)


def lambda_lr(function: Callable[[int], float]) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    return schedulers.LambdaLR(optimizer, function), optimizer


@pytest.mark.parametrize(
    "function",
    [partial(factor, warmup=10), closure(10), Frozen(10), demo_schedule(warmup_steps=10, steps=40, floor=0.1)],
    ids=["partial", "closure", "frozen", "demo"],
)
def test_a_function_that_only_computes_gives_its_warmup(function: Callable[[int], float]) -> None:
    curve = LrCurve(*lambda_lr(function))
    assert curve.unavailable is None
    assert curve.warmup_steps == 10


@pytest.mark.parametrize(
    "make",
    [
        nonlocal_count, list_in_closure, from_generator, Callable_, lambda: Unfrozen([]), lambda: counting_globally,
        lambda: listed, lambda: list_in_default, lambda: Callable_().__call__, lambda: partial(listed),
        lambda: lambda step: random.random(), lambda: lambda step: torch.rand(()).item(),
    ],
)  # fmt: skip
def test_a_function_with_state_gives_the_same_lrs_watched_and_unwatched(
    make: Callable[[], Callable[[int], float]],
) -> None:
    def lrs(*, watched: bool) -> list[float]:
        global TOTAL
        TOTAL, Callable_.calls = 0, 0
        CALLS.clear()
        (list_in_default.__defaults__ or ([],))[0].clear()
        random.seed(0)
        torch.manual_seed(0)
        scheduler, optimizer = lambda_lr(make())
        if watched:
            assert "state of its own" in (LrCurve(scheduler, optimizer).unavailable or "")
        seen = []
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            seen.append(scheduler.get_last_lr()[0])
        return seen

    assert lrs(watched=True) == lrs(watched=False)


def test_a_class_of_ones_own_is_not_called_beside_its_own_steps() -> None:
    class Shared(schedulers.LRScheduler):
        seen: ClassVar[list[int]] = []

        def get_lr(self) -> list[float]:
            Shared.seen.append(self.last_epoch)
            return [base / len(Shared.seen) for base in self.base_lrs]

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = Shared(optimizer)
    before = list(Shared.seen)
    curve = LrCurve(scheduler, optimizer)
    assert Shared.seen == before
    assert curve.unavailable == "Shared is not run ahead: it may have state of its own"
    assert curve.warmup_steps is None
