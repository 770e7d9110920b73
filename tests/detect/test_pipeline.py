"""The pipeline: one finding per incident and severity, quiet times, rollback, and a state that continues exactly."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from detect_runs import DelayedRun, columns, findings, healthy_loss, losses, scalars
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.pipeline import Pipeline, default_detectors


def troubled_run(seed: int = 0) -> list[Sample]:
    """A level shift, a burst, frozen scales and a NaN in one run."""
    rng = np.random.default_rng(seed)
    run = DelayedRun(columns(16, "max"))
    loss = healthy_loss(rng, 220)
    loss[120:135] *= 2
    samples = []
    for step in range(1, 221):
        if step == 170:
            run.is_stuck[:] = True
            run.scale *= 64
        values = {"loss": float(loss[step - 1]), "grad_norm": float(np.exp(rng.normal(0, 0.1))), "learning_rate": 1e-3}
        if step == 200:
            values["loss"] = math.nan
        samples.append(run.run(np.exp(rng.normal(0, 0.2, 6)), scalars=values))
    return samples


def test_one_line_an_incident_and_severity_with_the_same_onset() -> None:
    rng = np.random.default_rng(1)
    values = healthy_loss(rng, 400)
    values[300:330] *= 2
    found = findings(losses(values))
    assert [(f.severity, f.step) for f in found] == [("warn", 301), ("act", 303)]
    assert {f.onset_step for f in found} == {301}
    assert len({f.incident for f in found}) == 1
    assert len({f.id for f in found}) == 2


def test_an_incident_closes_after_silence_and_opens_anew() -> None:
    pipeline = Pipeline("run")
    bad = {50, 52, 100}
    seen = findings([scalars(s, loss=math.nan if s in bad else 1.0) for s in range(1, 140)], pipeline)
    assert [f.step for f in seen] == [50, 100]
    assert pipeline.open_incidents() == []


@pytest.mark.parametrize("quiet", [True, False])
def test_a_quiet_time_silences_baseline_rules_only(quiet: bool) -> None:
    values = np.full(200, 2.0)
    values[100:110] = 6.0
    samples = [
        Sample(attempt=0, step=i + 1, scalars={"loss": math.nan if i == 150 else float(v)}, is_quiet=quiet and i < 160)
        for i, v in enumerate(values)
    ]
    assert {f.detector for f in findings(samples)} == ({"nonfinite"} if quiet else {"nonfinite", "loss_spike"})


def test_a_new_attempt_forgets_what_did_not_happen_and_begins_quietly() -> None:  # case: SPK-05
    pipeline = Pipeline("run")
    values = np.full(160, 2.0)
    values[140:] = 6.0
    assert {f.severity for f in findings(losses(values), pipeline)} == {"warn", "act"}
    replay = [scalars(s, attempt=1, loss=6.0 if s > 141 else 2.0) for s in range(131, 180)]
    again = findings(replay, pipeline)
    assert [(f.step, f.detector, f.severity, f.attempt) for f in again] == [(151, "loss_spike", "act", 1)]
    assert again[0].onset_step == 142


def test_reset_closes_incidents_and_keeps_the_baseline_up_to_the_target() -> None:
    pipeline = Pipeline("run")
    findings([*losses(np.full(140, 2.0)), *losses(np.full(10, 6.0), first_step=141)], pipeline)
    assert pipeline.open_incidents()
    pipeline.reset("rollback", step=140)
    assert pipeline.open_incidents() == []
    later = [scalars(s, attempt=1, loss=6.0 if s > 165 else 2.0) for s in range(141, 175)]
    assert [f.step for f in findings(later, pipeline) if f.severity == "act"] == [168]


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(1, 219), seed=st.integers(0, 3))
def test_a_standby_continues_exactly(cut: int, seed: int) -> None:
    samples = troubled_run(seed)
    whole = Pipeline("run")
    expected = findings(samples, whole)
    first, second = Pipeline("run"), Pipeline("run")
    before = findings(samples[:cut], first)
    second.load(first.dump())
    assert before + findings(samples[cut:], second) == expected
    assert second.dump() == whole.dump()
    assert second.open_incidents() == whole.open_incidents()


def test_a_state_of_another_version_is_refused_whole() -> None:
    pipeline = Pipeline("run")
    findings(losses(np.full(40, 2.0)), pipeline)
    before = pipeline.dump()
    with pytest.raises(msgspec.DecodeError):
        pipeline.load(b"\x00 no state")
    assert pipeline.dump() == before


def test_everything_in_a_troubled_run_is_found() -> None:
    act = {(f.detector, f.step) for f in findings(troubled_run()) if f.severity == "act"}
    assert ("loss_spike", 123) in act
    assert ("scale_frozen", 171) in act
    assert ("nonfinite", 200) in act


class Broken:
    """A detector with a fault of its own."""

    name = "broken"

    def start(self) -> None:
        return None

    def update(self, state: None, sample: Sample) -> tuple[None, list[Symptom]]:
        raise KeyError("a format of tomorrow")


def test_a_detector_that_fails_takes_nothing_from_the_others_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline("r", [Broken(), *default_detectors()])
    found = [finding for step in range(1, 40) for finding in pipeline.observe(bad_loss_at(30, step))]
    assert [(finding.detector, finding.severity) for finding in found] == [("blind", "warn"), ("nonfinite", "act")]
    assert found[0].evidence["failed_detector"] == "broken"
    assert pipeline.failures == {"broken": 39}
    assert len(caplog.records) == 1


def bad_loss_at(bad: int, step: int) -> Sample:
    return Sample(attempt=0, step=step, scalars={"loss": math.nan if step == bad else 2.0})


def test_findings_can_be_sent() -> None:
    for finding in findings(troubled_run()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(finding), type=type(finding)) == finding
        msgspec.json.encode(finding)
