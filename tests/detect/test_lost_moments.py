"""An update that leaps although rate and gradient are ordinary: reported at once, acted on when it has an effect."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import drive, findings, scalars

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.update_rms import UpdateRms

FAULT = 120


def run(leap: dict[int, float], *, seed: int = 0, hurt: dict[int, float] | None = None, **more: float) -> list[Sample]:
    """Updates `leap` times as large, losses higher by `hurt` noises, at steps counted from the fault."""
    rng = np.random.default_rng(seed)
    steps = []
    for step in range(1, 201):
        values = {
            "learning_rate": 1e-3,
            "update_rms": float(3e-4 * np.exp(rng.normal(0, 0.1))) * leap.get(step - FAULT, 1.0),
            "grad_norm": float(np.exp(rng.normal(0, 0.1))),
            "loss": float(2.0 + 0.05 * (rng.standard_normal() + (hurt or {}).get(step - FAULT, 0.0))),
        }
        if step == FAULT:
            values |= more
        steps.append(scalars(step, **values))
    return steps


def acts(steps: list[Sample]) -> list[Symptom]:
    return [symptom for symptom in drive(UpdateRms(), steps) if symptom.severity == "act"]


ADAM = {k: max(1.0, 20.0 * 0.5**k) for k in range(5)}
"""How a lost second moment fills again."""


@pytest.mark.parametrize("seed", range(4))
def test_what_lasts_is_acted_on_at_the_second_update(seed: int) -> None:
    found = acts(run(ADAM, seed=seed))
    assert (found[0].step, found[0].onset_step) == (FAULT + 1, FAULT)
    assert found[0].evidence["update_leap_ratio"] == pytest.approx(20, rel=0.3)


def test_what_is_over_at_once_is_acted_on_when_the_loss_shows_it() -> None:
    assert acts(run({0: 20.0})) == []
    found = acts(run({0: 20.0}, hurt={k: 12.0 for k in range(1, 6)}))
    assert (found[0].step, found[0].onset_step) == (FAULT + 1, FAULT)


def test_where_updates_are_looked_at_now_and_then_the_next_look_decides() -> None:
    steps = run({k: 20.0 for k in range(40)})
    for sample in steps:
        if (sample.step - FAULT) % 10:
            del sample.scalars["update_rms"]
    assert acts(steps)[0].step == FAULT + 10


def test_a_gradient_or_a_rate_that_leaps_is_another_matter() -> None:
    assert [s for s in drive(UpdateRms(), run(ADAM, grad_norm=20.0)) if "update_leap_ratio" in s.evidence] == []
    assert [
        s for s in drive(UpdateRms(), run({0: 20.0}, learning_rate=2e-2)) if "update_leap_ratio" in s.evidence
    ] == []


def test_a_burst_that_the_clip_limit_took_is_an_ordinary_gradient() -> None:
    steps = run(ADAM, grad_norm=20.0)
    for sample in steps:
        sample.scalars["clip_limit"] = 1.0
    assert acts(steps)[0].onset_step == FAULT


def test_updates_too_small_to_matter_leap_as_they_like() -> None:
    steps = run(ADAM)
    for sample in steps:
        sample.scalars["update_ratio"] = 0.02 * sample.scalars["update_rms"]
    assert [s for s in drive(UpdateRms(), steps) if "update_leap_ratio" in s.evidence] == []
    for sample in steps:
        sample.scalars["update_ratio"] *= 1000
    assert acts(steps)


def test_a_step_to_an_average_now_and_then_does_no_harm_and_is_no_case() -> None:
    assert acts(run({k: 15.0 for k in (-40, -20, 0, 20, 40)})) == []


def test_the_cause_and_that_of_the_spike_after_it() -> None:
    found = [f for f in findings(run(ADAM, hurt={k: 14.0 for k in range(1, 9)})) if f.severity == "act"]
    assert {f.detector: f.cause for f in found} == {"update_rms": "optimisation", "loss_spike": "optimisation"}
    assert all(any("state is not what it was" in reason for reason in f.evidence["for"]) for f in found)
