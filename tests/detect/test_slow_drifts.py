"""Growth over hundreds or thousands of steps is found, and that of a young model is ignored."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import drive

from fp8watch.detect.amax_drift import AmaxDrift
from fp8watch.detect.base import Sample
from fp8watch.detect.crest import Crest
from fp8watch.detect.drift import Trends
from fp8watch.detect.kurtosis import Kurtosis
from fp8watch.records import TensorColumn

TENSORS = tuple(
    TensorColumn(module=f"blocks.{i}.down", tensor=tensor, block=str(i), fp8_format="e4m3")  # type: ignore[arg-type]
    for i in range(6)
    for tensor in ("input", "weight")
)


def sample(step: int, attempt: int = 0, **values: np.ndarray) -> Sample:
    arrays = {name: np.asarray(value, np.float32) for name, value in values.items()}
    return Sample(attempt=attempt, step=step, scalars={}, tensors=TENSORS, values=arrays)


def amaxes(num: int, seed: int = 0, noise: float = 0.25) -> np.ndarray:
    return np.exp2(np.random.default_rng(seed).normal(0, noise, (num, len(TENSORS))))


def grown(num: int, bits_per_1000: float, row: int = 2, start: int = 500, seed: int = 0) -> list[Sample]:
    values = amaxes(num, seed)
    values[start:, row] *= np.exp2(bits_per_1000 * np.arange(num - start) / 1000)
    return [sample(i + 1, amax=v) for i, v in enumerate(values)]


@pytest.mark.parametrize(("bits_per_1000", "by"), [(8.0, 1200), (1.5, 4600)])
def test_one_tensor_that_grows_slowly_is_warned_of(bits_per_1000: float, by: int) -> None:
    found = drive(AmaxDrift(), grown(5000, bits_per_1000))
    assert found
    assert {s.severity for s in found} == {"warn"}
    assert found[0].step <= by
    assert {s.tensors for s in found} == {(2,)}
    assert found[0].evidence["rise_log2"] >= 1.0
    assert 300 <= found[0].onset_step < found[0].step


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_growth_that_all_share_are_nothing(seed: int) -> None:
    values = amaxes(4000, seed, noise=0.5)
    shared = np.exp2(4 * (1 - np.exp(-np.arange(4000) / 600)))[:, None]
    assert drive(AmaxDrift(), [sample(i + 1, amax=v) for i, v in enumerate(values * shared)]) == []


def test_a_young_model_in_which_one_tensor_settles_elsewhere_is_nothing() -> None:
    values = amaxes(3000, 1)
    values[:, 2] *= np.exp2(3 * (1 - np.exp(-np.arange(3000) / 120)))
    assert drive(AmaxDrift(), [sample(i + 1, amax=v) for i, v in enumerate(values)]) == []


def test_a_level_shift_is_no_drift() -> None:
    values = amaxes(3000, 2)
    values[1000:, 2] *= 8
    assert drive(AmaxDrift(), [sample(i + 1, amax=v) for i, v in enumerate(values)]) == []


def test_a_rollback_takes_the_drift_back() -> None:
    detector = AmaxDrift()
    state = detector.start()
    samples = grown(1400, 8.0)
    for item in samples:
        state, symptoms = detector.update(state, item)
    assert symptoms
    state = detector.rolled_back(state, 400)
    state, symptoms = detector.update(state, sample(401, attempt=1, amax=amaxes(1)[0]))
    assert symptoms == []


def test_unobserved_points_do_not_count() -> None:
    trends = Trends()
    trends.follow([column.name for column in TENSORS])
    usable = np.ones(len(TENSORS), np.bool_)
    usable[3] = False
    for step in range(1, 600):
        trends.push(np.full(len(TENSORS), step / 50), usable, step)
    rise = trends.rise(0)
    assert rise[3] == 0
    assert (rise[:3] > 1).all()


def crest_sample(step: int, crest: float) -> Sample:
    mse = np.full(len(TENSORS), 1e-3)
    amax = np.full(len(TENSORS), 30.0)
    amax[0] = crest * np.sqrt(1e-3 * 10**3.15)
    return sample(step, amax=amax, mse=mse, snr=np.full(len(TENSORS), 31.5))


def test_an_element_ten_thousand_times_the_rest_is_warned_of() -> None:
    samples = [crest_sample(i, 40.0) for i in range(1, 40)] + [crest_sample(i, 6000.0) for i in range(40, 45)]
    found = drive(Crest(), samples)
    assert [s.step for s in found] == [41, 42, 43, 44]
    assert (found[0].onset_step, found[0].tensors, found[0].severity) == (40, (0,), "warn")
    assert found[0].evidence["expected_underflow_ratio"] == pytest.approx(1.74e-6 * 6000, rel=1e-3)


def test_a_crest_of_its_own_and_a_single_odd_step_are_nothing() -> None:
    steady = [crest_sample(i, 1200.0) for i in range(1, 60)]
    assert [s.step for s in drive(Crest(), steady) if s.step > 20] == []
    assert drive(Crest(), [crest_sample(i, 6000.0 if i == 30 else 40.0) for i in range(1, 60)]) == []


def test_kurtosis_that_grows_is_warned_of_and_a_high_level_is_not() -> None:
    rng = np.random.default_rng(0)

    def series(growth: float) -> list[Sample]:
        made = []
        for step in range(10, 16_000, 10):
            kappa = np.exp(rng.normal(0, 0.2, len(TENSORS))) * 30
            kappa[4] *= np.exp(growth * max(0, step - 6_000) / 10_000)
            made.append(sample(step, kurtosis=kappa))
        return made

    assert drive(Kurtosis(), series(0.0)) == []
    found = drive(Kurtosis(), series(2.5))
    assert found
    assert {(s.severity, s.tensors) for s in found} == {("warn", (4,))}
    assert found[0].evidence["growth"] > 2
