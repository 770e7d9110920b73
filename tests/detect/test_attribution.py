"""The same symptom with different causes: the evidence around it decides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from detect_runs import DelayedRun, columns, findings

from fp8watch.detect.base import Sample
from fp8watch.records import Finding

FAULT = 150


def run(change: Callable[[int, DelayedRun, dict[str, float], np.ndarray], None], seed: int = 0) -> list[Finding]:
    """A run of 200 steps; `change(step, run, scalars, amax)` makes the fault."""
    rng = np.random.default_rng(seed)
    delayed = DelayedRun(columns(16, "max"))
    samples: list[Sample] = []
    for step in range(1, 201):
        scalars = {
            "loss": 2.0 * float(1 + 0.01 * rng.standard_normal()),
            "grad_norm": float(np.exp(rng.normal(0, 0.1))),
            "learning_rate": 1e-3,
            "update_rms": 1e-3 * float(np.exp(rng.normal(0, 0.1))),
        }
        amax = np.exp(rng.normal(0, 0.1, 6))
        amax[[1, 4]] = 0.5 + 1e-4 * step
        change(step, delayed, scalars, amax)
        samples.append(delayed.run(amax, scalars=scalars))
    return findings(samples)


def spike(step: int, scalars: dict[str, float]) -> None:
    if FAULT <= step < FAULT + 10:
        scalars["loss"] *= 2


def cause_of(found: list[Finding], detector: str) -> str:
    return next(f.cause for f in found if f.detector == detector and f.severity == "act")


def bad_batches(step: int, delayed: DelayedRun, scalars: dict[str, float], amax: np.ndarray) -> None:
    spike(step, scalars)


def frozen(step: int, delayed: DelayedRun, scalars: dict[str, float], amax: np.ndarray) -> None:
    spike(step, scalars)
    if step == FAULT:
        delayed.scale *= 64
        delayed.is_stuck[:] = True


def rate_jump(step: int, delayed: DelayedRun, scalars: dict[str, float], amax: np.ndarray) -> None:
    spike(step - 2, scalars)
    if FAULT <= step < FAULT + 40:
        scalars["learning_rate"] *= 30
        scalars["update_rms"] *= 30


def flipped_bit(step: int, delayed: DelayedRun, scalars: dict[str, float], amax: np.ndarray) -> None:
    spike(step - 1, scalars)
    if step >= FAULT:
        amax[1] = 5e4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fault", "cause"),
    [(bad_batches, "data"), (frozen, "bookkeeping"), (rate_jump, "optimisation"), (flipped_bit, "hardware")],
)
def test_a_loss_spike_has_the_cause_that_the_window_shows(
    fault: Callable[[int, DelayedRun, dict[str, float], np.ndarray], None], cause: str, seed: int
) -> None:
    found = run(fault, seed)
    assert cause_of(found, "loss_spike") == cause
    reasons = next(f for f in found if f.detector == "loss_spike" and f.severity == "act").evidence
    assert reasons["for"]


def test_what_points_at_the_layer_names_it() -> None:
    found = run(flipped_bit)
    jump = next(f for f in found if f.detector == "amax_jump")
    assert (jump.cause, jump.layer, jump.tensor, jump.step) == (
        "hardware", "blocks.0.mlp.down", "blocks.0.mlp.down:weight", FAULT,
    )  # fmt: skip


def test_saturation_that_a_wrong_scale_explains_is_bookkeeping_and_else_precision() -> None:
    def outgrown(step: int, delayed: DelayedRun, scalars: dict[str, float], amax: np.ndarray) -> None:
        # The window cannot keep up: the amax grows eightfold every step for a while, scales are right throughout.
        if step >= FAULT:
            amax[0] *= 8.0 ** min(step - FAULT + 1, 20)

    assert cause_of(run(frozen), "saturation") == "bookkeeping"
    assert cause_of(run(outgrown), "saturation") == "precision"


def test_without_evidence_the_cause_is_unknown() -> None:
    def lone_nan(step: int, delayed: DelayedRun, scalars: dict[str, float], amax: np.ndarray) -> None:
        if step == FAULT:
            scalars["loss"] = float("nan")

    (found,) = run(lone_nan)
    assert (found.detector, found.cause, found.evidence["for"]) == ("nonfinite", "unknown", [])


def test_a_large_weight_jump_that_large_updates_explain_is_no_hardware_fault() -> None:
    def thrown(step: int, delayed: DelayedRun, scalars: dict[str, float], amax: np.ndarray) -> None:
        if step >= FAULT:
            scalars["learning_rate"] *= 30
            scalars["update_rms"] = 1.0
            amax[1] = 20.0

    assert cause_of(run(thrown), "amax_jump") == "optimisation"
