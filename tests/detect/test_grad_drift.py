"""A gradient norm that grows with no point out of range."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import drive, findings, scalars

from fp8watch.detect import state as codec
from fp8watch.detect.base import Sample
from fp8watch.detect.grad_drift import GradDrift, GradDriftState
from fp8watch.detect.grad_spike import GradSpike


def run(log2_norms: np.ndarray, noise: float = 0.4, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    values = np.exp2(log2_norms + noise * rng.standard_normal(len(log2_norms)))
    return [scalars(i + 1, grad_norm=float(value)) for i, value in enumerate(values)]


def growing(num: int, bits_per_1000: float, start: int = 500) -> np.ndarray:
    return bits_per_1000 * np.maximum(0, np.arange(num) - start) / 1000


@pytest.mark.parametrize(("bits_per_1000", "by"), [(6.0, 1100), (1.2, 4700)])
def test_slow_growth_is_warned_of_where_the_spike_rule_sees_nothing(bits_per_1000: float, by: int) -> None:
    steps = run(growing(by, bits_per_1000))
    assert [s for s in drive(GradSpike(), steps) if s.severity == "act"] == []
    found = drive(GradDrift(), steps)
    assert found
    assert {symptom.severity for symptom in found} == {"warn"}
    assert found[0].evidence["rise_log2"] >= 1.0
    assert found[0].onset_step >= 300


def test_noise_decay_settling_and_shifts_are_nothing() -> None:
    num = 4000
    steps = np.arange(num)
    shapes = {
        "flat": np.zeros(num),
        "decay": -3 * steps / num,
        "settling": 3 * (1 - np.exp(-steps / 150)),
        "shift": np.where(steps < 2000, 0.0, 2.0),
        "a bit in the whole training": steps / num,
    }
    for name, shape in shapes.items():
        assert drive(GradDrift(), run(shape)) == [], name


def test_one_incident_that_survives_a_restart_and_goes_with_a_rollback() -> None:
    steps = run(growing(1200, 6.0))
    assert len([f for f in findings(steps) if f.detector == "grad_drift"]) == 1
    detector = GradDrift()
    state = detector.start()
    for sample in steps[:1100]:
        state, seen = detector.update(state, sample)
    assert seen
    again = codec.decode(codec.encode(state), GradDriftState)
    assert detector.update(again, steps[1100])[1]
    assert detector.update(detector.rolled_back(state, 700), steps[700])[1] == []
