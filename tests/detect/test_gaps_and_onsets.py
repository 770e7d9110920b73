"""A gap in the frames is no evidence, and a case to act has its own onset, not that of an older warning."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from detect_runs import DelayedRun, columns, findings
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.pipeline import Pipeline
from fp8watch.detect.scale_frozen import ScaleFrozen


def delayed(length: int, algo: str, num: int, seed: int = 0, stuck_from: int | None = None) -> list[Sample]:
    rng = np.random.default_rng(seed)
    run = DelayedRun(columns(length, algo))
    samples = []
    for step in range(1, num + 1):
        if step == stuck_from:
            run.is_stuck[:] = True
            run.scale *= 64
        samples.append(run.run(np.exp(rng.normal(0, 0.7, 6))))
    return samples


@pytest.mark.parametrize(("length", "algo"), [(1024, "max"), (16, "max"), (1, "most_recent")])
@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, 60), max_size=55), st.integers(0, 5))
def test_lost_frames_of_a_healthy_run_are_no_frozen_scale(length: int, algo: str, lost: set[int], seed: int) -> None:
    samples = [sample for sample in delayed(length, algo, 60, seed) if sample.step not in lost]
    assert findings(samples, Pipeline("r", [ScaleFrozen()])) == []


@pytest.mark.parametrize(("length", "algo"), [(1024, "max"), (16, "max"), (1, "most_recent")])
def test_a_frozen_scale_is_found_after_a_gap_too(length: int, algo: str) -> None:
    samples = [sample for sample in delayed(length, algo, 80, stuck_from=60) if sample.step not in range(30, 40)]
    (found,) = findings(samples, Pipeline("r", [ScaleFrozen()]))
    assert (found.onset_step, found.severity) == (60, "act")


class Scripted:
    """Symptoms at given steps: severity and names of tensors, worst first."""

    name = "crest"

    def __init__(self, script: dict[int, tuple[str, list[str]]]) -> None:
        self._script = script

    def start(self) -> None:
        return None

    def update(self, state: Any, sample: Sample) -> tuple[Any, list[Symptom]]:
        if sample.step not in self._script:
            return state, []
        severity, names = self._script[sample.step]
        places = [column.name for column in sample.tensors]
        symptom = Symptom(
            detector=self.name,
            severity=severity,  # type: ignore[arg-type]
            step=sample.step,
            onset_step=sample.step,
            tensors=tuple(places.index(name) for name in names),
        )
        return state, [symptom]


class Stubborn(Scripted):
    """Cannot go back."""

    def rolled_back(self, state: Any, step: int) -> Any:
        raise ValueError("no way back")


def test_a_detector_that_fails_at_a_rollback_does_not_keep_the_old_timeline_open() -> None:
    samples = delayed(16, "max", 60)
    pipeline = Pipeline("r", [Stubborn({40: ("act", [WEIGHT])}), ScaleFrozen()])
    findings(samples[:41], pipeline)
    assert pipeline.open_incidents()
    pipeline.reset("rollback", 30)
    assert pipeline.open_incidents() == []
    assert pipeline.failures == {"crest": 1}
    again = [dataclasses.replace(sample, attempt=1) for sample in samples[30:]]
    assert [finding.step for finding in findings(again, pipeline)] == [40]


WEIGHT, GRADIENT = "blocks.0.mlp.down:weight", "blocks.1.mlp.down:grad_output"


def act(script: dict[int, tuple[str, list[str]]]) -> tuple[int, int]:
    """Onset of the finding to act on, and the number of incidents."""
    found = findings(delayed(16, "max", 60), Pipeline("r", [Scripted(script)]))
    (serious,) = [finding for finding in found if finding.severity == "act"]
    return serious.onset_step, len({finding.incident for finding in found})


def test_a_fault_elsewhere_does_not_begin_with_an_old_warning() -> None:
    """A long-standing warning about a gradient must not move the onset back and taint every checkpoint."""
    warnings = {step: ("warn", [GRADIENT]) for step in range(5, 60, 10)}
    assert act(warnings | {50: ("act", [WEIGHT, GRADIENT])}) == (50, 2)


def test_a_warning_that_gets_worse_keeps_its_onset() -> None:
    warnings = {step: ("warn", [GRADIENT]) for step in range(40, 50)}
    assert act(warnings | {50: ("act", [GRADIENT, WEIGHT])}) == (40, 1)


def test_a_warning_long_ago_is_not_the_beginning() -> None:
    """One step of clipping in warm-up, and ten steps later a fault in the same tensor."""
    script = {20: ("warn", [GRADIENT]), 30: ("warn", [GRADIENT]), 31: ("warn", [GRADIENT]), 32: ("act", [GRADIENT])}
    assert act(script) == (30, 2)
