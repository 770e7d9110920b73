"""saturation, underflow and amax_jump: lasting symptoms are acted on, passing ones are not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from detect_runs import DelayedRun, columns, drive

from fp8watch.detect.amax_jump import AmaxJump
from fp8watch.detect.base import Sample
from fp8watch.detect.saturation import Saturation
from fp8watch.detect.underflow import Underflow


def acts(symptoms: list) -> list[int]:
    return [symptom.step for symptom in symptoms if symptom.severity == "act"]


def amaxes(seed: int, num: int, sigma: float = 0.3) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, sigma, (num, 6)))


@pytest.mark.parametrize(("history_len", "algo"), [(1024, "max"), (16, "max"), (1, "most_recent")])
@pytest.mark.parametrize("seed", range(3))
def test_the_clipping_of_a_healthy_delayed_run_is_not_acted_on(history_len: int, algo: str, seed: int) -> None:
    run = DelayedRun(columns(history_len, algo))
    growth = np.exp(np.linspace(0, 5, 1000))[:, None]
    assert acts(drive(Saturation(), [run.run(a) for a in amaxes(seed, 1000) * growth])) == []


def test_clipping_that_stays_is_acted_on_with_its_tensor_and_onset() -> None:
    run = DelayedRun(columns(16, "max"))
    values = amaxes(0, 120)
    samples = [run.run(a) for a in values[:100]]
    run.is_stuck[1] = True
    values[100:, 1] *= 32
    symptoms = [s for s in drive(Saturation(), samples + [run.run(a) for a in values[100:]]) if s.severity == "act"]
    assert (symptoms[0].step, symptoms[0].onset_step, symptoms[0].tensors) == (103, 101, (1,))
    assert symptoms[0].evidence["clip_ratio"] > 4


def test_a_burst_of_two_steps_stays_a_warning() -> None:
    run = DelayedRun(columns(1024, "max"))
    values = amaxes(1, 200)
    values[150:152, 0] *= 64
    symptoms = drive(Saturation(), [run.run(a) for a in values])
    assert symptoms
    assert acts(symptoms) == []


def test_a_module_in_high_precision_does_not_clip() -> None:
    run = DelayedRun(columns())
    run.factor[:] = 64
    high = {"high_precision": np.ones(6, np.uint8)}
    assert drive(Saturation(), [run.run(a, values=dict(high)) for a in amaxes(2, 60)]) == []


def test_saturated_elements_count_where_amax_says_little() -> None:
    run = DelayedRun(columns())
    counts = {"quantized": np.full(6, 1000, np.uint64), "saturated": np.array([0, 0, 200, 0, 0, 0], np.uint64)}
    run.factor[:] = 2.5
    symptoms = drive(Saturation(), [run.run(np.ones(6), values=dict(counts)) for _ in range(30)])
    assert acts(symptoms)
    assert next(s for s in symptoms if s.severity == "act").tensors == (2,)


def counted(run: DelayedRun, share: float, tensor: int, base: float, snr: float = 31.0) -> Sample:
    lost, ratio = np.full(6, base * 1e5), np.full(6, 31.0, np.float32)
    lost[tensor], ratio[tensor] = share * 1e5, snr
    counts = {"quantized": np.full(6, 100_000, np.uint64), "underflowed": lost.astype(np.uint64), "snr": ratio}
    return run.run(np.ones(6), values=counts)


@pytest.mark.parametrize(
    ("base", "share", "snr", "is_found"),
    [
        (0.0, 0.12, 25.0, True),
        (0.0, 0.12, 31.0, False),  # attention's gradients: many small ones lost, the signal is in the others
        (0.0, 0.08, 25.0, False),
        (0.05, 0.12, 25.0, False),
        (0.05, 0.2, 25.0, True),
        (0.0, 0.9, 70.0, True),  # one huge element: an excellent ratio, and nothing else left
    ],
)
def test_underflow_is_held_against_the_tensors_own_past(base: float, share: float, snr: float, is_found: bool) -> None:
    run = DelayedRun(columns())
    samples = [counted(run, base, 2, base) for _ in range(40)] + [counted(run, share, 2, base, snr) for _ in range(10)]
    symptoms = [s for s in drive(Underflow(), samples) if s.severity == "act"]
    assert bool(symptoms) is is_found
    if is_found:
        assert (symptoms[0].step, symptoms[0].onset_step, symptoms[0].tensors) == (43, 41, (2,))


def test_one_sampled_step_of_underflow_is_nothing() -> None:
    run = DelayedRun(columns())
    samples = [counted(run, 0.5 if i == 40 else 0.0, 2, 0.0, 10.0) for i in range(60)]
    assert drive(Underflow(), samples) == []


def test_steps_without_counts_are_passed_over() -> None:
    run = DelayedRun(columns())
    samples = []
    for i in range(300):
        is_bad = i >= 200
        sample = counted(run, 0.2 if is_bad else 0.0, 2, 0.0, 20.0 if is_bad else 31.0)
        if i % 10:
            sample = dataclasses.replace(sample, values={k: sample.values[k] for k in ("amax", "scale")})
        samples.append(sample)
    assert acts(drive(Underflow(), samples))[0] == 221


@pytest.mark.parametrize(("tensor", "severity"), [(1, "act"), (0, "warn"), (2, "warn")])
def test_a_weight_that_leaps_is_acted_on_other_tensors_follow_the_batch(tensor: int, severity: str) -> None:
    run = DelayedRun(columns())
    values = amaxes(3, 100, sigma=0.05)
    values[60:, tensor] *= 2.0**12
    symptoms = drive(AmaxJump(), [run.run(a) for a in values])
    assert {s.severity for s in symptoms} == {severity}
    assert (symptoms[0].step, symptoms[0].onset_step, symptoms[0].tensors) == (61, 61, (tensor,))


def test_a_weight_that_grows_step_by_step_does_not_leap() -> None:
    run = DelayedRun(columns())
    growth = np.exp(np.linspace(0, 8, 300))[:, None]
    assert acts(drive(AmaxJump(), [run.run(a) for a in amaxes(4, 300, sigma=0.01) * growth])) == []
