"""Bursts, single micro-batches and lone NaNs: what the evidence says about their cause, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from detect_runs import DelayedRun, columns, findings

from fp8watch.detect.base import Sample
from fp8watch.records import Finding

FAULT = 100
Change = Callable[[int, dict[str, float], np.ndarray], None]


def run(change: Change, *, ranks: int = 1, seed: int = 0) -> list[Finding]:
    """120 steps of two layers with an ordinary clip limit of 1000 times their gradient norm, ..., changed at a step."""
    rng = np.random.default_rng(seed)
    delayed = DelayedRun(columns(16, "max"))
    steps: list[Sample] = []
    for step in range(1, 121):
        scalars = {
            "loss": 2.0 * float(1 + 0.02 * rng.standard_normal()),
            "grad_norm": float(np.exp(rng.normal(0, 0.1))),
            "clip_limit": 1000.0,
            "learning_rate": 1e-3,
            "update_rms": 3e-4 * float(np.exp(rng.normal(0, 0.1))),
        }
        scalars |= {"loss_micro_median": scalars["loss"] * 0.99, "loss_micro_max": scalars["loss"] * 1.05}
        amax = np.exp(rng.normal(0, 0.1, 6))
        change(step, scalars, amax)
        steps.append(delayed.run(amax, scalars=scalars))
    return findings(steps)


def act(found: list[Finding], detector: str) -> Finding:
    return next(f for f in found if f.detector == detector and f.severity == "act")


def burst(*rows: int, **scalars: float) -> Change:
    """The gradients of some rows (2 and 5 are gradients) and the norm are 200x at the fault."""

    def change(step: int, values: dict[str, float], amax: np.ndarray) -> None:
        if step == FAULT:
            values["grad_norm"] *= 200
            amax[list(rows)] *= 200
            values.update(scalars)

    return change


def test_a_burst_of_all_layers_that_a_loose_limit_lets_through_is_the_limits_fault() -> None:
    found = act(run(burst(2, 5)), "grad_spike")
    assert found.cause == "optimisation"
    assert any("clip limit" in reason for reason in found.evidence["for"])
    against = found.evidence["other_causes"]["hardware"]["against"]
    assert against == ["the gradients of all layers grew alike: they came so from the loss"]


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("one layer's gradient only: a format or a device may have made it", burst(2)),
        ("the loss was out of range as well: it may be the batch", burst(2, 5, loss=6.0)),
        ("the limit is tight: the update did not feel it", burst(2, 5, clip_limit=1.5)),
    ],
)
def test_else_it_is_not_said_to_be(why: str, change: Change) -> None:
    assert all(f.cause != "optimisation" for f in run(change) if f.detector == "grad_spike"), why


def test_wrong_scales_outweigh_the_limit() -> None:
    delayed = DelayedRun(columns(16, "max"))
    rng = np.random.default_rng(0)
    steps = []
    for step in range(1, 121):
        if step == FAULT - 2:
            delayed.scale *= 64
            delayed.is_stuck[:] = True
        scalars = {"loss": 2.0 * float(1 + 0.02 * rng.standard_normal()), "grad_norm": 1.0, "clip_limit": 1000.0}
        amax = np.exp(rng.normal(0, 0.1, 6))
        burst(2, 5)(step, scalars, amax)
        steps.append(delayed.run(amax, scalars=scalars))
    assert act(findings(steps), "grad_spike").cause == "bookkeeping"


def spike(**more: float) -> Change:
    def change(step: int, values: dict[str, float], amax: np.ndarray) -> None:
        if FAULT <= step < FAULT + 5:
            values["loss"] = 3.0
            values |= {"loss_micro_median": 3.0, "loss_micro_max": 3.1} | more  # in place
            if step >= FAULT - 1:
                values["update_rms"] *= 1.0

    return change


def reasons(found: Finding) -> list[str]:
    others: dict[str, Any] = found.evidence["other_causes"]
    return [*found.evidence["for"], *(reason for case in others.values() for reason in case["for"])]


def test_one_micro_batch_out_of_range_speaks_for_the_data() -> None:
    one = act(run(spike(loss_micro_median=1.98, loss_micro_max=6.0)), "loss_spike")
    assert one.cause == "data"
    assert any("one micro-batch only" in reason for reason in reasons(one))
    every = act(run(spike()), "loss_spike")
    assert not any("micro-batch" in reason for reason in reasons(every))


def test_the_micro_batches_decide_where_the_rest_does_not() -> None:
    def late(step: int, values: dict[str, float], amax: np.ndarray) -> None:
        # Updates before it were larger than usual, which alone would leave the cause open.
        spike(loss_micro_median=1.98, loss_micro_max=6.0)(step, values, amax)
        if FAULT - 12 <= step < FAULT - 8:
            values["loss"] = 2.2

    def known(step: int, values: dict[str, float], amax: np.ndarray) -> None:
        late(step, values, amax)
        del values["update_rms"]

    def unknown(step: int, values: dict[str, float], amax: np.ndarray) -> None:
        known(step, values, amax)
        del values["loss_micro_median"], values["loss_micro_max"]

    assert act(run(known), "loss_spike").cause == "data"
    assert act(run(unknown), "loss_spike").cause == "unknown"


def nan_in(row: int) -> list[Sample]:
    """A step whose elements are counted; one element of a row is NaN."""
    counts = np.zeros(6, dtype=np.uint64)
    counts[row] = 1
    counts[2] = counts[5] = 64
    return [
        Sample(
            attempt=0, step=step, scalars={"loss": 2.0 if step < 50 else float("nan")}, tensors=columns(16, "max"),
            values={"nonfinite": counts if step == 50 else np.zeros(6, dtype=np.uint64)},
        )
        for step in range(1, 51)
    ]  # fmt: skip


def test_a_lone_nan_says_where_it_was_first_and_what_that_excludes_but_no_cause() -> None:
    (found,) = findings(nan_in(3))
    assert (found.cause, found.evidence["for"]) == ("unknown", [])
    assert found.tensor == "blocks.1.mlp.down:input"
    assert found.evidence["first_nonfinite"] == "blocks.1.mlp.down:input"
    assert found.evidence["finite_casts_before"] == 2
    assert list(found.evidence["nonfinite_elements"]) == [
        "blocks.1.mlp.down:input", "blocks.0.mlp.down:grad_output", "blocks.1.mlp.down:grad_output",
    ]  # fmt: skip
    assert "the batch is" in found.evidence["other_causes"]["data"]["against"][0]
    (first,) = findings(nan_in(0))
    assert first.evidence["finite_casts_before"] == 0
    assert "data" not in first.evidence["other_causes"]
