"""A run compared with a reference: the size of the gap by phase, and its growth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from detect_runs import drive, findings, scalars

from fp8watch.detect.base import Sample
from fp8watch.detect.reference_gap import ReferenceGap, tolerance
from fp8watch.replay.readers import csv_log

STEPS = np.arange(1, 10_001, 10)


def pair(gap: np.ndarray, noise: float = 0.0005, seed: int = 0) -> list[Sample]:
    """Same data: the noise of the batches is in both losses; what differs is the gap and a little of its own."""
    rng = np.random.default_rng(seed)
    reference = 2.0 + 4.0 * np.exp(-STEPS / 2000) + 0.05 * rng.standard_normal(len(STEPS))
    losses = reference + gap + noise * rng.standard_normal(len(STEPS))
    return [
        scalars(int(step), loss=float(loss), reference_loss=float(other))
        for step, loss, other in zip(STEPS, losses, reference, strict=True)
    ]


SHRINKING = np.maximum(0.004, 0.09 * np.minimum(1.0, 1000 / STEPS))


def test_a_gap_that_shrinks_with_the_training_passes() -> None:  # case: NUM-13
    assert SHRINKING[99] == pytest.approx(0.09, rel=0.01)
    assert drive(ReferenceGap(), pair(SHRINKING)) == []


def test_a_small_gap_that_grows_through_the_cooldown_is_warned_of() -> None:  # case: NUM-13
    growing = 0.004 * np.maximum(0.25, (STEPS - 6000) / 4000 * 1.0)
    growing[STEPS > 8000] = 0.002 + 0.004 * (STEPS[STEPS > 8000] - 8000) / 2000
    found = drive(ReferenceGap(), pair(growing, noise=0.0002))
    assert found
    assert {symptom.severity for symptom in found} == {"warn"}
    assert found[0].evidence["gap"] < tolerance(found[0].step) / 2
    assert found[0].evidence["growth"] > 0
    assert found[0].step > 8000


def test_a_gap_of_the_first_thousand_steps_is_too_large_at_the_end() -> None:  # case: NUM-13
    constant = np.full(len(STEPS), 0.05)
    found = drive(ReferenceGap(), pair(constant))
    assert found
    assert 2000 <= found[0].step <= 2400, "0.05 is the tolerance at step 2,000"
    assert len([f for f in findings(pair(constant)) if f.detector == "reference_gap"]) == 1


def test_steps_without_a_reference_are_skipped_and_nothing_is_said_past_its_end() -> None:  # case: NUM-13
    steps = pair(np.where(STEPS > 5000, 0.5, 0.001))
    for sample in steps:
        if sample.step > 5000 or sample.step % 20 == 1:
            del sample.scalars["reference_loss"]
    assert drive(ReferenceGap(), steps) == []
    better = pair(np.full(len(STEPS), -0.3))
    assert drive(ReferenceGap(), better) == [], "to be better is no fault"


def test_a_column_of_a_log_is_a_reference(tmp_path: Path) -> None:
    path = tmp_path / "pair.csv"
    rows = [f"{s.step},{s.scalars['loss']},{s.scalars['reference_loss']}" for s in pair(np.full(len(STEPS), 0.05))]
    path.write_text("\n".join(["step,loss,reference_loss", *rows, "10011,2.0,"]) + "\n")
    found = findings(csv_log.read(path).samples)
    assert [(f.detector, f.severity) for f in found] == [("reference_gap", "warn")]


def test_a_rollback_forgets_what_came_after() -> None:
    detector, steps = ReferenceGap(), pair(np.where(STEPS > 5000, 0.05, 0.001))
    state = detector.start()
    for sample in steps[:600]:
        state, symptoms = detector.update(state, sample)
    assert symptoms
    state = detector.rolled_back(state, 5000)
    assert detector.update(state, scalars(5011, loss=2.0, reference_loss=2.0))[1] == []
