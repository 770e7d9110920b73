"""grad_spike: clipping deals with single bursts; what explodes, stays or keeps coming back is acted on."""

from __future__ import annotations

import math

import numpy as np
from detect_runs import drive, findings, scalars

from fp8watch.detect.grad_spike import GradSpike


def norms(rng: np.random.Generator, num: int, level: float = 1.0) -> np.ndarray:
    return level * np.exp(rng.normal(0, 0.2, num))


def samples(values: np.ndarray, loss: float = 1.23) -> list:
    return [scalars(i + 1, loss=loss, grad_norm=float(v)) for i, v in enumerate(values)]


def test_the_norm_explodes_while_the_loss_is_ordinary() -> None:  # case: SPK-14
    values = np.concatenate([norms(np.random.default_rng(0), 100, 4.0), [5e3, 2e8, math.nan]])
    found = [(f.detector, f.severity, f.step) for f in findings(samples(values))]
    assert found == [("grad_spike", "warn", 101), ("grad_spike", "act", 102), ("nonfinite", "act", 103)]


def test_bursts_that_the_clip_limit_takes_the_force_of_are_no_case_to_act() -> None:
    values = norms(np.random.default_rng(2), 300)
    values[200::15] *= 300
    clipped = [scalars(i + 1, grad_norm=float(v), clip_limit=1.5) for i, v in enumerate(values)]
    unlimited = [scalars(i + 1, grad_norm=float(v), clip_limit=1000.0) for i, v in enumerate(values)]
    assert [s for s in drive(GradSpike(), clipped) if s.severity == "act"] == []
    assert next(s.step for s in drive(GradSpike(), unlimited) if s.severity == "act") == 201


def test_a_single_burst_is_a_warning() -> None:
    values = norms(np.random.default_rng(1), 300)
    values[200] *= 50
    assert {s.severity for s in drive(GradSpike(), samples(values))} == {"warn"}


def test_bursts_that_come_back_are_acted_on_with_the_first_as_onset() -> None:
    values = norms(np.random.default_rng(2), 300)
    values[200::15] *= 300
    act = [s for s in drive(GradSpike(), samples(values)) if s.severity == "act"]
    assert act[0].step <= 200 + 3 * 15 + 1
    assert act[0].onset_step == 201
    assert act[0].evidence["is_recurring"] is True


def test_healthy_norms_are_silent() -> None:
    for seed in range(5):
        decay = np.exp(-np.arange(2000) / 1000)
        values = norms(np.random.default_rng(seed), 2000) * (0.3 + decay)
        assert [s for s in drive(GradSpike(), samples(values)) if s.severity == "act"] == []


def test_a_norm_that_grows_and_stays_is_acted_on() -> None:
    values = norms(np.random.default_rng(3), 200)
    values[150:] *= 10
    act = [s for s in drive(GradSpike(), samples(values)) if s.severity == "act"]
    assert (act[0].step, act[0].onset_step) == (155, 151)
