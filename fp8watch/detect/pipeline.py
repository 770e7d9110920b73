"""All detectors of one run, one sample at a time: symptoms to incidents to findings with a cause.

Used by the controller (live) and by replay (recorded); both give it samples in order and get back what is new.
Nothing looks ahead and nothing written is taken back, so the findings of a prefix of a run are a prefix of the
run's findings.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from fp8watch.detect import state as codec
from fp8watch.detect.amax_jump import AmaxJump
from fp8watch.detect.attribution import attribute
from fp8watch.detect.base import Detector, Sample, Symptom
from fp8watch.detect.context import Context
from fp8watch.detect.divergence import Divergence
from fp8watch.detect.grad_spike import GradSpike
from fp8watch.detect.incidents import Incident, Incidents
from fp8watch.detect.loss_spike import LossSpike
from fp8watch.detect.nonfinite import Nonfinite
from fp8watch.detect.saturation import Saturation
from fp8watch.detect.scale_frozen import ScaleFrozen
from fp8watch.detect.underflow import Underflow
from fp8watch.detect.update_rms import UpdateRms
from fp8watch.records import Finding

logger = logging.getLogger(__name__)
QUIET_STEPS = 20
"""Steps after a resume or rollback in which rules that rest on a baseline keep still."""
BASELINE_RULES = frozenset({"loss_spike", "grad_spike", "divergence"})
"""Rules that a quiet period silences. What needs no baseline (numbers, scales, the learning rate) has none."""
STATE_VERSION = 1


def default_detectors() -> list[Detector]:
    """Every detector, those first whose findings explain the others'."""
    return [
        Nonfinite(), ScaleFrozen(), AmaxJump(), UpdateRms(), Saturation(), Underflow(), LossSpike(), GradSpike(),
        Divergence(),
    ]  # fmt: skip


class _PipelineState(msgspec.Struct):
    version: int = STATE_VERSION
    attempt: int = 0
    last_step: int | None = None
    quiet_until: int = -1
    incidents: Incidents = msgspec.field(default_factory=Incidents)
    context: Context = msgspec.field(default_factory=Context)


class _Dump(msgspec.Struct):
    pipeline: msgspec.Raw
    detectors: dict[str, msgspec.Raw]


class Pipeline:
    """The detectors of one run and their incidents."""

    def __init__(self, run: str, detectors: Sequence[Detector] | None = None) -> None:
        self.run = run
        self._detectors = list(default_detectors() if detectors is None else detectors)
        self._states: dict[str, Any] = {detector.name: detector.start() for detector in self._detectors}
        self._state = _PipelineState()
        self.failures: Counter[str] = Counter()
        """Detector -> steps at which it failed. The others go on without it."""

    def observe(self, sample: Sample) -> list[Finding]:
        """Take the next step in; the findings that are new with it: one an incident and severity."""
        state = self._state
        if state.last_step is not None and sample.attempt > state.attempt:
            self.reset("rollback", sample.step - 1)
        state.attempt, state.last_step = sample.attempt, sample.step
        symptoms: list[Symptom] = []
        for detector in self._detectors:
            try:
                self._states[detector.name], seen = detector.update(self._states[detector.name], sample)
            except Exception:
                if not self.failures[detector.name]:
                    logger.exception("detector %s failed at step %s of run %s", detector.name, sample.step, self.run)
                self.failures[detector.name] += 1
                continue
            symptoms += seen
        state.context.push(sample, symptoms)
        state.incidents.age()
        is_quiet = sample.is_quiet or sample.step <= state.quiet_until
        findings = []
        for symptom in symptoms:
            if is_quiet and symptom.detector in BASELINE_RULES:
                continue
            if symptom.detector == "divergence" and self._is_known_spike(symptom):
                continue
            finding = self._note(symptom, sample)
            if finding is not None:
                findings.append(finding)
        return findings

    def open_incidents(self) -> list[Incident]:
        """What is under way now, oldest first."""
        return list(self._state.incidents.open.values())

    def reset(self, after: Literal["rollback", "resume"], step: int) -> None:
        """The run goes on from `step`: later steps are forgotten, incidents close, and a quiet time begins.

        Baselines keep what is still true (points up to `step`), so that a replayed step is not measured against
        its own spike.
        """
        for detector in self._detectors:
            rolled_back = getattr(detector, "rolled_back", None)
            self._states[detector.name] = (
                detector.start() if rolled_back is None else rolled_back(self._states[detector.name], step)
            )
        self._state.context.cut(step)
        self._state.incidents.open.clear()
        self._state.quiet_until = step + QUIET_STEPS

    def dump(self) -> bytes:
        """Everything known, so that `load` elsewhere continues exactly."""
        states = {name: msgspec.Raw(codec.encode(state)) for name, state in self._states.items()}
        return msgspec.msgpack.encode(_Dump(pipeline=msgspec.Raw(codec.encode(self._state)), detectors=states))

    def load(self, data: bytes) -> None:
        """Continue from a `dump`. Raises `msgspec.DecodeError` or `ValidationError`; nothing has changed then."""
        dump = msgspec.msgpack.decode(data, type=_Dump)
        state = codec.decode(dump.pipeline, _PipelineState)
        if state.version != STATE_VERSION:
            raise msgspec.ValidationError(f"state version {state.version}, wanted {STATE_VERSION}")
        states = {
            name: codec.decode(dump.detectors[name], type(current)) if name in dump.detectors else current
            for name, current in self._states.items()
        }
        self._state, self._states = state, states

    def _is_known_spike(self, symptom: Symptom) -> bool:
        """Whether the drift's window holds a loss that the spike rule has found already."""
        first: int = symptom.evidence["window_steps"][0]
        return self._state.context.find("loss_spike", "act", since=first) is not None

    def _note(self, symptom: Symptom, sample: Sample) -> Finding | None:
        incidents = self._state.incidents
        incident = incidents.open.get(symptom.detector)
        modules = list(dict.fromkeys(sample.tensors[i].module for i in symptom.tensors))
        tensors = [sample.tensors[i].name for i in symptom.tensors]
        if incident is not None:
            incident.last_seen_step, incident.silent_samples = sample.step, 0
            incident.layers = modules + [layer for layer in incident.layers if layer not in modules]
            incident.tensors = tensors + [name for name in incident.tensors if name not in tensors]
            incident.evidence |= symptom.evidence
            if incident.severity == "act" or symptom.severity == "warn":
                return None
        verdict = attribute(symptom, self._state.context)
        if incident is None:
            incident = Incident(
                id=incidents.next_incident(),
                detector=symptom.detector,
                severity=symptom.severity,
                cause=verdict.cause,
                attempt=sample.attempt,
                onset_step=symptom.onset_step,
                first_step=sample.step,
                last_seen_step=sample.step,
                layers=modules,
                tensors=tensors,
            )
            incidents.open[symptom.detector] = incident
        incident.severity, incident.cause, incident.rank = symptom.severity, verdict.cause, symptom.rank
        incident.evidence = symptom.evidence | verdict.evidence
        finding = Finding(
            id=incidents.next_finding(),
            run=self.run,
            attempt=sample.attempt,
            step=sample.step,
            onset_step=incident.onset_step,
            detector=symptom.detector,
            severity=symptom.severity,
            cause=verdict.cause,
            tensor=tensors[0] if tensors else None,
            layer=modules[0] if modules else None,
            rank=symptom.rank,
            layers=list(incident.layers),
            evidence=dict(incident.evidence),
            incident=incident.id,
        )
        incident.findings.append(finding.id)
        return finding
