"""loss_spike: real departures are acted on quickly, outliers and healthy curves are not."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import drive, findings, healthy_loss, losses, scalars

from fp8watch.detect.loss_spike import LossSpike
from fp8watch.detect.pipeline import Pipeline


def acts(symptoms: list) -> list[int]:
    return [symptom.step for symptom in symptoms if symptom.severity == "act"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.003, 0.03, 0.1])
def test_a_healthy_curve_is_silent(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    assert acts(drive(LossSpike(), losses(healthy_loss(rng, 1200, noise)))) == []


def test_a_steep_start_is_no_spike() -> None:  # case: SPK-08
    rng = np.random.default_rng(0)
    values = np.linspace(11, 3, 200) * (1 + 0.1 * rng.standard_normal(200))
    assert acts(drive(LossSpike(), losses([*values, *(3 * (1 + 0.1 * rng.standard_normal(200)))]))) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_level_shift_is_known_within_three_steps_and_stays_open(seed: int) -> None:  # case: SPK-10
    rng = np.random.default_rng(seed)
    values = np.where(np.arange(400) < 300, 1.7, 11.5) * (1 + 0.02 * rng.standard_normal(400))
    pipeline = Pipeline("run")
    act = [f for f in findings(losses(values), pipeline) if f.severity == "act"]
    assert len(act) == 1
    assert act[0].onset_step == 301
    assert act[0].step <= 303
    assert [incident.detector for incident in pipeline.open_incidents()] == ["loss_spike"]


def test_one_point_far_out_is_a_warning_at_most() -> None:
    rng = np.random.default_rng(1)
    values = healthy_loss(rng, 600)
    values[400] *= 2
    symptoms = drive(LossSpike(), losses(values))
    assert [(s.step, s.severity) for s in symptoms] == [(401, "warn")]


def test_where_points_are_far_apart_one_is_enough() -> None:
    rng = np.random.default_rng(2)
    values = healthy_loss(rng, 300)
    values[200] *= 1.6
    sparse = [scalars(100 * i, loss=float(v)) for i, v in enumerate(values)]
    assert acts(drive(LossSpike(), sparse)) == [20000]


def test_single_high_points_that_are_everyday_life_are_not_acted_on() -> None:
    """A bimodal loss (strong augmentation), points far apart: one in four lies 60 % above the others."""
    rng = np.random.default_rng(3)
    values = 3.0 * (1 + 0.02 * rng.standard_normal(3000)) * np.where(rng.random(3000) < 0.25, 1.6, 1.0)
    assert acts(drive(LossSpike(), [scalars(100 * i, loss=float(v)) for i, v in enumerate(values)])) == []


def test_a_slow_rise_has_its_onset_at_its_foot() -> None:
    rng = np.random.default_rng(4)
    values = 3.0 * (1 + 0.005 * rng.standard_normal(400))
    values[300:340] *= 1 + np.linspace(0, 0.8, 40)
    first = next(s for s in drive(LossSpike(), losses(values)) if s.severity == "act")
    assert 300 <= first.onset_step <= 305 < first.step <= 312


def test_a_second_spike_is_a_second_incident() -> None:
    rng = np.random.default_rng(5)
    values = healthy_loss(rng, 600)
    values[300:310] *= 2
    values[330:340] *= 2
    assert [f.onset_step for f in findings(losses(values)) if f.severity == "act"] == [301, 331]


def test_a_loss_below_zero_is_watched_too() -> None:
    rng = np.random.default_rng(6)
    values = -2.0 + 0.02 * rng.standard_normal(300)
    values[200:210] += 2.0
    assert acts(drive(LossSpike(), losses(values)))[0] == 203


def test_a_replayed_spike_is_not_measured_against_itself() -> None:
    rng = np.random.default_rng(7)
    values = healthy_loss(rng, 320)
    values[300:320] *= 3
    detector = LossSpike()
    state = detector.start()
    for sample in losses(values):
        state, _ = detector.update(state, sample)
    state = detector.rolled_back(state, 290)
    assert state.baseline.steps[-1] == 290
    again = []
    for sample in losses(values[290:], first_step=291):
        state, symptoms = detector.update(state, sample)
        again += symptoms
    assert acts(again)[0] == 303
