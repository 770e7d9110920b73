"""A share of zeroed elements that grows too slowly for a rule that looks at the newest steps."""

from __future__ import annotations

import numpy as np
from detect_runs import drive, findings

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.underflow import Underflow
from fp8watch.detect.underflow_drift import UnderflowDrift
from fp8watch.records import TensorColumn

TENSORS = tuple(
    TensorColumn(module=f"blocks.{i}.mlp.down", tensor=tensor, block=str(i), fp8_format="e4m3")  # type: ignore[arg-type]
    for i in range(6)
    for tensor in ("input", "weight")
)
ELEMENTS = 1 << 20
ROW = 4
EVERY = 10
"""Counts come with one step in ten, as by default."""


def run(shares: np.ndarray, *, row: int | None = ROW, snr: np.ndarray | None = None, seed: int = 0) -> list[Sample]:
    """`shares` [num] of one tensor (of all: row None) on sampled steps, counted in a million elements; others 0.3 %."""
    rng = np.random.default_rng(seed)
    steps = []
    for i, share in enumerate(shares):
        truth = np.full(len(TENSORS), 0.003 if row is not None else share)
        truth[row if row is not None else 0] = share
        counted = rng.binomial(ELEMENTS, np.clip(truth * np.exp(rng.normal(0, 0.1, len(TENSORS))), 0, 1))
        values = {
            "quantized": np.full(len(TENSORS), ELEMENTS, dtype=np.uint64),
            "underflowed": counted.astype(np.uint64),
            "snr": np.full(len(TENSORS), 31.5 if snr is None else snr[i], dtype=np.float32),
        }
        steps.append(Sample(attempt=0, step=EVERY * (i + 1), scalars={}, tensors=TENSORS, values=values))
    return steps


def slow(num: int = 1200, start: int = 480, doubling: int = 100, first: float = 0.002) -> np.ndarray:
    return np.minimum(first * 2.0 ** np.maximum(0, (np.arange(num) - start) / doubling), 0.9)


def of(symptoms: list[Symptom], severity: str) -> list[Symptom]:
    return [symptom for symptom in symptoms if symptom.severity == severity]


def test_a_share_that_doubles_every_hundred_samples_is_found_where_the_level_rule_is_blind() -> None:
    steps = run(slow(900))  # from 0.2 % to 3.7 %
    assert drive(Underflow(), steps) == []
    found = drive(UnderflowDrift(), steps)
    assert {symptom.severity for symptom in found} == {"warn"}
    assert {symptom.tensors for symptom in found} == {(ROW,)}
    assert found[0].evidence["underflowed_ratio"] >= 0.01
    assert found[0].evidence["rise_log2"] >= np.log2(3)
    assert EVERY * 440 <= found[0].onset_step < found[0].step, "the window in which it grew"


def test_a_drift_that_costs_signal_is_acted_on_long_before_everything_is_lost() -> None:
    shares = slow(1300)
    fading = 31.5 - 1.8 * np.log2(shares / 0.002)
    steps = run(shares, snr=fading)
    found = of(drive(UnderflowDrift(), steps), "act")
    assert found
    assert 0.1 < found[0].evidence["underflowed_ratio"] < 0.25
    assert found[0].evidence["snr_loss_db"] > 3
    assert of(drive(UnderflowDrift(), run(shares)), "act") == [], "an undiminished signal is a warning"
    level = of(drive(Underflow(), steps), "act")
    assert not level or level[0].step > found[0].step


def test_noise_shared_growth_small_shares_and_shifts_are_nothing() -> None:
    rng = np.random.default_rng(1)
    assert drive(UnderflowDrift(), run(0.02 * np.exp(rng.normal(0, 0.3, 1200)))) == []
    assert drive(UnderflowDrift(), run(slow(900), row=None)) == [], "all of the kind alike"
    assert drive(UnderflowDrift(), run(slow(900, first=1e-5))) == [], "below a hundredth"
    assert drive(UnderflowDrift(), run(np.where(np.arange(1200) < 600, 0.002, 0.03))) == []


def test_the_first_two_windows_are_a_young_models() -> None:
    assert drive(UnderflowDrift(), run(slow(440, start=0))) == []


def test_a_rollback_takes_it_back_and_a_restart_keeps_it() -> None:
    from fp8watch.detect import state as codec

    steps = run(slow(900))
    detector = UnderflowDrift()
    state = detector.start()
    for sample in steps[:800]:
        state, symptoms = detector.update(state, sample)
    assert symptoms
    again = codec.decode(codec.encode(state), type(state))
    state, here = detector.update(detector.rolled_back(state, EVERY * 700), steps[700])
    assert here == []
    again, there = detector.update(again, steps[800])
    assert there


def test_one_incident_and_its_layer() -> None:
    found = [f for f in findings(run(slow(900))) if f.detector == "underflow_drift"]
    assert [(f.severity, f.layer) for f in found] == [("warn", "blocks.2.mlp.down")]
