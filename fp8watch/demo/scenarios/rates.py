"""Faults of the learning rate. They are in the scheduler, so they come back when the same positions are replayed."""

from __future__ import annotations

from functools import partial

from fp8watch.demo.scenarios.base import Fault, Scenario, Setting
from fp8watch.demo.schedule import Schedule


def _raised(step: int, *, schedule: Schedule, first: int, last: int, factor: float) -> float:
    return schedule(step) * (factor if first <= step < last else 1.0)


class RaisedRate(Fault):
    """The schedule gives `FACTOR` times the LR for `NUM_STEPS` steps, starting with `fault_step`."""

    FACTOR = 30.0
    NUM_STEPS = 40

    def __init__(self, fault_step: int) -> None:
        self._first = fault_step - 1

    def schedule(self, schedule: Schedule) -> Schedule:
        """The schedule with the raised steps."""
        last = self._first + self.NUM_STEPS
        return partial(_raised, schedule=schedule, first=self._first, last=last, factor=self.FACTOR)


def _raise(setting: Setting) -> RaisedRate:
    return RaisedRate(setting.fault_step)


def _none(setting: Setting) -> Fault:
    return Fault()


SHORT_WARMUP_STEPS = 10

SCENARIOS = (
    Scenario(
        name="lr-too-high",
        family="optimisation",
        summary="the scheduler's LR is 30x too high for 40 steps",
        make=_raise,
        recurs="with the scheduler's position",
    ),
    Scenario(
        name="short-warmup",
        family="optimisation",
        summary="a peak LR that needs its warm-up, which is cut short",
        make=_none,
        recurs="with the scheduler's position",
        takes_fault_step=False,
        both={"peak_lr": 1.2e-2, "warmup_steps": 100},
        faulty={"warmup_steps": SHORT_WARMUP_STEPS},
    ),
)
