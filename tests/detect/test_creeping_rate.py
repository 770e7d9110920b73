"""A learning rate that climbs without a jump: compared with its settled past, and acted on when it does harm."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import drive, findings, scalars

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.pipeline import Pipeline
from fp8watch.detect.update_rms import UpdateRms

START = 150


def run(rates: np.ndarray, *, harm: float = 0.0, seed: int = 0, moved: bool = True) -> list[Sample]:
    """The loss falls, and lies `harm` noises higher for each doubling of the rate beyond the first step's top."""
    rng = np.random.default_rng(seed)
    top = rates[:START].max()
    steps = []
    for i, rate in enumerate(rates):
        loss = 2.0 - 1e-3 * i + 0.05 * (rng.standard_normal() + harm * max(0.0, np.log2(rate / top)))
        values = {"learning_rate": float(rate), "loss": float(loss), "grad_norm": float(np.exp(rng.normal(0, 0.2)))}
        if moved:
            values["update_rms"] = float(0.3 * rate * np.exp(rng.normal(0, 0.1)))
        steps.append(scalars(i + 1, **values))
    return steps


def creeping(growth: float = 1.06, num: int = 260, most: float = 30.0) -> np.ndarray:
    steps = np.arange(num)
    decayed = 1e-3 * np.minimum((steps + 1) / 20, 1) * (1 - steps / (2 * num))
    return decayed * np.minimum(most, growth ** np.maximum(0, steps - START + 1))


def acts(steps: list[Sample]) -> list[Symptom]:
    return [symptom for symptom in drive(UpdateRms(), steps) if symptom.severity == "act"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("growth", [1.03, 1.06, 1.1])
def test_a_climb_that_costs_loss_is_acted_on_with_the_step_at_which_it_left_the_known(growth: float, seed: int) -> None:
    rates = creeping(growth)
    found = acts(run(rates, harm=2.0, seed=seed))
    assert found, "nothing found"
    settled = rates[20 : START - 1].max()
    passed = 1 + int(np.flatnonzero((np.arange(len(rates)) >= START) & (rates > settled))[0])
    assert abs(found[0].onset_step - passed) <= 3
    assert rates[found[0].step - 1] > 2 * settled, "not before it has doubled"
    assert found[0].evidence["learning_rate_before"] == pytest.approx(settled, rel=0.1)


@pytest.mark.parametrize("seed", range(2))
def test_a_climb_that_trains_on_as_before_is_a_warning(seed: int) -> None:
    seen = drive(UpdateRms(), run(creeping(), harm=0.0, seed=seed))
    assert {symptom.severity for symptom in seen} == {"warn"}


def test_a_climb_whose_updates_do_not_follow_is_a_warning_at_most_and_logs_tell_nothing() -> None:
    steps = run(creeping(), harm=2.0)
    for sample in steps:
        sample.scalars["update_rms"] = 3e-4
    assert acts(steps) == []
    assert drive(UpdateRms(), run(creeping(), harm=2.0, moved=False)) == []


@pytest.mark.parametrize("seed", range(2))
def test_schedules_that_climb_on_purpose_are_silent(seed: int) -> None:
    steps = np.arange(400)
    cosine = 0.55 + 0.45 * np.cos(np.pi * steps / 400)
    shapes = {
        "one long warm-up": (steps + 1) / 400,
        "warm-up and decay": np.minimum((steps + 1) / 100, 1) * cosine,
        "warm restarts": np.concatenate([cosine[::4]] * 4),
        "cyclic": 0.1 + 0.9 * np.abs((steps % 100) / 50 - 1),
        "doubled in stages": 2.0 ** (steps // 100),
        "decay to nothing and back": np.concatenate([cosine[:200], np.linspace(0.1, 1.0, 200)]),
    }
    for name, shape in shapes.items():
        seen = drive(UpdateRms(), run(1e-3 * shape, harm=2.0, seed=seed))
        assert [s for s in seen if "is_creeping" in s.evidence or s.severity == "act"] == [], name


def test_a_level_that_stays_becomes_the_settled_one() -> None:
    rates = np.concatenate([np.full(100, 1e-4), 1e-4 * 1.05 ** np.arange(40), np.full(500, 7e-4)])
    seen = drive(UpdateRms(), run(rates, harm=0.0))
    assert seen
    assert seen[-1].step < 100 + 40 + 210


def test_the_loss_that_follows_has_the_climb_as_its_cause() -> None:
    steps = run(creeping(), harm=2.0)
    for sample in steps[240:]:
        sample.scalars["loss"] += 3.0
    spike = next(f for f in findings(steps) if f.detector == "loss_spike" and f.severity == "act")
    assert spike.cause == "optimisation"
    assert any("climbed" in reason for reason in spike.evidence["for"])


def test_a_rollback_and_a_restart_of_the_controller_lose_nothing() -> None:
    steps = run(creeping(), harm=2.0)
    whole = [(f.step, f.detector, f.severity) for f in findings(steps)]
    first, second = Pipeline("run"), Pipeline("run")
    head = findings(steps[:180], first)
    second.load(first.dump())
    assert [(f.step, f.detector, f.severity) for f in [*head, *findings(steps[180:], second)]] == whole
    # Back to before the climb: it is found again, by what had settled before it.
    detector = UpdateRms()
    state = detector.start()
    for sample in steps[:200]:
        state, _ = detector.update(state, sample)
    state = detector.rolled_back(state, START - 10)
    seen = []
    for sample in steps[START - 10 :]:
        state, symptoms = detector.update(state, sample)
        seen += symptoms
    assert any(symptom.severity == "act" for symptom in seen)
