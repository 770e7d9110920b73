"""nonfinite: any non-finite value is found at once, also in the first step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from detect_runs import DelayedRun, columns, drive, findings, scalars

from fp8watch.detect.base import Sample
from fp8watch.detect.nonfinite import Nonfinite


def test_it_fires_in_the_first_step_and_in_a_quiet_one() -> None:  # case: NUM-01
    (first,) = findings([Sample(attempt=0, step=1, scalars={"loss": math.nan}, is_quiet=True)])
    assert (first.detector, first.severity, first.step, first.onset_step) == ("nonfinite", "act", 1, 1)
    assert first.evidence["is_first_step"] is True


def test_a_late_one_fires_in_its_own_step() -> None:  # case: NUM-01
    run = [scalars(step, loss=2.0) for step in range(1, 250)] + [scalars(250, loss=math.inf)]
    assert [(f.step, f.detector) for f in findings(run)] == [(250, "nonfinite")]


def test_the_raw_loss_is_what_counts_not_what_a_log_makes_of_it() -> None:  # case: SPK-12
    raw = [scalars(step, loss=math.nan if step == 40 else 2.3) for step in range(1, 80)]
    repaired = [scalars(step, loss=2.31 if step == 40 else 2.3) for step in range(1, 80)]
    assert [f.step for f in findings(raw)] == [40]
    assert findings(repaired) == []


@pytest.mark.parametrize("name", ["loss", "grad_norm", "update_rms"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scalars(name: str, value: float) -> None:
    symptoms = drive(Nonfinite(), [scalars(1, **{name: value})])
    assert symptoms[0].evidence["quantities"] == [name]


def test_tensors_are_named_forward_ones_first() -> None:
    run = DelayedRun(columns())
    sample = run.run(np.ones(6))
    sample.values["amax"][[2, 3]] = [np.inf, np.nan]
    sample.values["nonfinite"] = np.array([0, 0, 0, 7, 0, 0], dtype=np.uint64)
    (symptom,) = drive(Nonfinite(), [sample])
    assert [sample.tensors[i].name for i in symptom.tensors] == [
        "blocks.1.mlp.down:input",
        "blocks.0.mlp.down:grad_output",
    ]
    assert symptom.evidence["nonfinite_elements"] == {"blocks.1.mlp.down:input": 7}


def test_what_was_not_observed_is_not_judged() -> None:
    run = DelayedRun(columns())
    sample = run.run(np.ones(6))
    sample.values["amax"][1] = np.nan
    sample.valid["amax"] = np.array([1, 0, 1, 1, 1, 1], dtype=bool)
    assert drive(Nonfinite(), [sample]) == []


def test_a_stretch_is_one_incident_with_the_onset_of_its_first_step() -> None:
    run = [scalars(s, loss=math.nan if 10 <= s < 15 else 1.0) for s in range(1, 40)]
    assert [(f.step, f.onset_step) for f in findings(run)] == [(10, 10)]
