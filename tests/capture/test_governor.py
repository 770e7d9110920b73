"""Sampling within a budget: which kind is thinned first, when it recovers, and what is measured."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.capture.cost_meter import AT_FIRST, TIMED, CostMeter, spacing
from fp8watch.capture.governor import MOST_DOUBLINGS, Governor

BASE = {"statistics": 10, "what_if": 100, "shadow": 100}


def run(governor: Governor, steps: int, costs: dict[str, float], first: int = 1, step_seconds: float = 0.1) -> None:
    for step in range(first, first + steps):
        governor.step_took(step_seconds)
        for kind, seconds in costs.items():
            if governor.due(kind, step):
                governor.cost(kind, seconds)


def test_cheap_sampling_is_left_alone():
    said: list[str] = []
    governor = Governor(BASE, budget=0.01, say=said.append)
    run(governor, 2000, {"statistics": 0.002, "what_if": 0.02, "shadow": 0.01})
    assert {kind: governor.every(kind) for kind in BASE} == BASE
    assert governor.share() == pytest.approx(0.002 / 10 / 0.1 + 0.02 / 100 / 0.1 + 0.01 / 100 / 0.1, rel=0.01)
    assert said == []


def test_probe_and_what_if_give_way_before_element_counts():
    said: list[str] = []
    governor = Governor(BASE, budget=0.01, say=said.append)
    run(governor, 3000, {"statistics": 0.006, "what_if": 0.05, "shadow": 0.08})
    assert governor.every("statistics") == 10
    assert governor.every("shadow") > 100
    assert governor.share() <= 0.01
    assert len(said) >= 1
    assert all("budget 1.00%" in text for text in said)
    assert "statistics every 10" in said[0]


def test_element_counts_give_way_when_they_are_the_cost():
    governor = Governor(BASE, budget=0.01)
    run(governor, 4000, {"statistics": 0.05, "what_if": 0.001, "shadow": 0.001})
    assert governor.every("statistics") == 80  # 0.05 / 80 / 0.1 is the first under 1 %
    assert governor.every("what_if") == 100
    assert governor.share() <= 0.01


def test_it_comes_back_slowly_and_only_as_far_as_it_fits():
    governor = Governor(BASE, budget=0.01)
    run(governor, 4000, {"statistics": 0.05})
    assert governor.every("statistics") == 80
    run(governor, 80 * 7, {"statistics": 0.0001}, first=4001)
    assert governor.every("statistics") == 80  # not yet
    run(governor, 20_000, {"statistics": 0.0001}, first=4001 + 80 * 7)
    assert governor.every("statistics") == 10


def test_without_a_budget_nothing_is_thinned_but_the_share_is_known():
    governor = Governor({"statistics": 1, "what_if": 64, "shadow": 0}, budget=None)
    run(governor, 300, {"statistics": 0.5, "what_if": 3.0, "shadow": 1.0}, step_seconds=1.0)
    assert governor.every("statistics") == 1
    assert governor.every("what_if") == 64
    assert governor.share() == pytest.approx(0.5 + 3 / 64, rel=0.05)
    assert not any(governor.due("shadow", step) for step in range(1, 1000))


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=60), st.floats(1e-4, 0.5))
def test_sampled_steps_of_a_thinned_rank_are_among_those_of_another(costs, budget):
    thin, dense = Governor(BASE, budget=budget), Governor(BASE, budget=None)
    supply = itertools.cycle(costs)
    for step in range(1, 1500):
        for governor in (thin, dense):
            governor.step_took(0.1)
        for kind in BASE:
            if thin.due(kind, step):
                assert dense.due(kind, step)
                thin.cost(kind, next(supply))
        assert all(thin.every(kind) <= BASE[kind] << MOST_DOUBLINGS for kind in BASE)


@given(
    st.lists(st.integers(0, 64), min_size=3, max_size=3), st.lists(st.floats(0.0, 2.0), max_size=20),
    st.integers(1, 10_000),
)  # fmt: skip
def test_nothing_is_due_before_the_step_that_is_due_next(bases, costs, step):
    kinds = ("statistics", "what_if", "shadow")
    governor = Governor(dict(zip(kinds, bases, strict=True)), budget=0.01, say=lambda _: None)
    governor.step_took(0.1)
    for kind, seconds in zip(kinds * 7, costs, strict=False):
        governor.cost(kind, seconds)
    found = governor.next_due(step)
    if not any(bases):
        assert found > step + 1000
        return
    assert any(governor.due(kind, found) for kind in kinds)
    assert not any(governor.due(kind, earlier) for kind in kinds for earlier in range(step, min(found, step + 300)))


def test_a_pause_is_no_step_and_the_first_sample_does_not_count():
    governor = Governor(BASE, budget=0.01)
    governor.step_took(0.1)
    governor.step_took(3600.0)
    governor.cost("statistics", 60.0)  # compiles kernels
    assert governor.every("statistics") == 10
    governor.cost("statistics", 0.005)
    assert governor.share() == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize("num_pieces", [1, AT_FIRST, AT_FIRST + 1, 192, 1680])
def test_pieces_that_are_not_timed_cost_what_the_others_do(monkeypatch, num_pieces):
    clock = [0.0]
    asked = []
    monkeypatch.setattr("fp8watch.capture.cost_meter.time.thread_time", lambda: asked.append(1) or clock[0])
    meter = CostMeter(torch.device("cpu"))
    with meter.piece(is_alone=True):  # in front of the others or behind them, it is not taken for one of them
        clock[0] += 5.0
    for _ in range(num_pieces):
        with meter.piece():
            clock[0] += 0.25
    with meter.piece(is_alone=True):
        clock[0] += 7.0
    meter.close_step()
    assert list(meter.take()) == [pytest.approx(12.0 + 0.25 * num_pieces)]
    assert len(asked) <= 2 * (3 + num_pieces // AT_FIRST)
    assert meter.is_idle


@pytest.mark.parametrize("layers", [1, 2, 8, 16, 80])
def test_pieces_of_very_different_cost_are_estimated_rightly_on_average(monkeypatch, layers):
    """Casts of a Transformer layer: forward ones, then backward ones, which are of other sizes."""
    forward, backward = [2.0, 3.0, 1.0, 1.0, 2.0, 4.0, 8.0, 4.0], [1.0, 8.0, 1.0, 3.0]
    costs = forward * layers + backward * layers
    clock = [0.0]
    monkeypatch.setattr("fp8watch.capture.cost_meter.time.thread_time", lambda: clock[0])
    meter = CostMeter(torch.device("cpu"))
    found, timed = [], []
    for _ in range(200):
        numbers, every = meter.numbers()
        for cost in costs:
            if next(numbers) % every == 0:
                with meter.timed():
                    clock[0] += cost
                timed.append(1)
            else:
                clock[0] += cost
        meter.close_step()
        found += meter.take()
    assert sum(found[1:]) / len(found[1:]) == pytest.approx(sum(costs), rel=0.03)
    assert len(found) == 200, "every step is estimated"
    assert len(timed) / 200 <= 3 * TIMED


def test_what_is_timed_shares_no_factor_with_a_layer():
    assert [spacing(count) for count in (0, 1, 12, 96, 192, 1680)] == [1, 1, 1, 7, 19, 185]


def test_the_meter_gives_the_time_of_its_pieces_once_a_step():
    meter = CostMeter(torch.device("cpu"))
    assert list(meter.take()) == []
    for _ in range(2):
        with meter.piece():
            end = time.thread_time() + 0.004
            while time.thread_time() < end:
                pass
    with pytest.raises(RuntimeError, match="broken"), meter.piece():
        raise RuntimeError("broken")
    meter.close_step()
    meter.close_step()  # a step without a sample is none
    (seconds,) = meter.take()
    assert 0.008 <= seconds < 0.1
    assert list(meter.take()) == []
