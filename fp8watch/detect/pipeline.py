"""All detectors of one run, one sample at a time: symptoms become incidents, incidents become findings with a cause.

Used by the controller (live) and by replay (recorded): both pass samples in order and get back what is new. Nothing
looks ahead and nothing reported is taken back, so the findings of a prefix of a run are a prefix of the run's findings.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from fp8watch.detect import state as codec
from fp8watch.detect.amax_drift import AmaxDrift
from fp8watch.detect.amax_jump import AmaxJump
from fp8watch.detect.attention_logit import AttentionLogit
from fp8watch.detect.attribution import Attribution, attribute
from fp8watch.detect.base import Detector, Sample, Symptom
from fp8watch.detect.blind import Blind
from fp8watch.detect.clip_rate import ClipRate
from fp8watch.detect.context import Context
from fp8watch.detect.crest import Crest
from fp8watch.detect.divergence import Divergence
from fp8watch.detect.grad_drift import GradDrift
from fp8watch.detect.grad_spike import GradSpike
from fp8watch.detect.incidents import PAUSE_SAMPLES, Incident, Incidents
from fp8watch.detect.kurtosis import Kurtosis
from fp8watch.detect.loss_spike import LossSpike
from fp8watch.detect.no_progress import NoProgress
from fp8watch.detect.nonfinite import Nonfinite
from fp8watch.detect.rank_mismatch import RankMismatch
from fp8watch.detect.reference_gap import ReferenceGap
from fp8watch.detect.saturation import Saturation
from fp8watch.detect.scale_frozen import ScaleFrozen
from fp8watch.detect.shadow_error import ShadowError
from fp8watch.detect.stuck import Stuck
from fp8watch.detect.underflow import Underflow
from fp8watch.detect.underflow_drift import UnderflowDrift
from fp8watch.detect.update_rms import UpdateRms
from fp8watch.detect.zero_grad import ZeroGrad
from fp8watch.records import Finding

logger = logging.getLogger(__name__)
QUIET_STEPS = 20
"""Steps after a resume or rollback in which rules that rest on a baseline stay silent."""
BASELINE_RULES = frozenset(
    {
        "loss_spike",
        "grad_spike",
        "divergence",
        "amax_drift",
        "underflow_drift",
        "grad_drift",
        "kurtosis",
        "zero_grad",
        "clip_rate",
    }
)
"""Rules that a quiet period silences. Rules without a baseline (numbers, scales, the learning rate) have none."""
EXPLAIN_SHADOW = ("scale_frozen", "saturation", "underflow", "underflow_drift")
"""Detectors that explain an error of a layer's FP8 GEMM. Where one of them acts, the probe's finding stays a
warning."""
STATE_VERSION = 2


def default_detectors() -> list[Detector]:
    """Every detector; those whose findings explain the others' come first."""
    return [
        Nonfinite(), RankMismatch(), ScaleFrozen(), AmaxJump(), UpdateRms(), Saturation(), Underflow(), Crest(),
        ShadowError(), AmaxDrift(), UnderflowDrift(), Kurtosis(), AttentionLogit(), ZeroGrad(), ClipRate(), Stuck(),
        NoProgress(), LossSpike(), GradSpike(), GradDrift(), Divergence(), ReferenceGap(), Blind(),
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
        self._of_scalars = [detector for detector in self._detectors if not getattr(detector, "of_tensors", False)]
        self._states: dict[str, Any] = {detector.name: detector.start() for detector in self._detectors}
        self._state = _PipelineState()
        self.failures: Counter[str] = Counter()
        """Detector -> steps at which it failed. The others continue without it."""

    def observe(self, sample: Sample) -> list[Finding]:
        """Process the next step; returns the new findings, at most one per incident and severity."""
        state = self._state
        if state.last_step is not None and sample.attempt > state.attempt:
            self.reset("rollback", sample.step - 1)
        state.attempt, state.last_step = sample.attempt, sample.step
        symptoms: list[Symptom] = []
        for detector in self._detectors if sample.values else self._of_scalars:
            try:
                self._states[detector.name], seen = detector.update(self._states[detector.name], sample)
            except Exception:
                if not self.failures[detector.name]:
                    logger.exception("detector %s failed at step %s of run %s", detector.name, sample.step, self.run)
                self.failures[detector.name] += 1
                symptoms.append(_failed(detector.name, self.failures[detector.name], sample.step))
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
            if symptom.detector == "shadow_error" and symptom.severity == "act" and self._is_explained(symptom):
                symptom = dataclasses.replace(symptom, severity="warn")
            finding = self._note(symptom, sample)
            if finding is not None:
                findings.append(finding)
        return findings

    def open_incidents(self) -> list[Incident]:
        """The open incidents, oldest first."""
        return list(self._state.incidents.open.values())

    def reset(self, after: Literal["rollback", "resume"], step: int) -> None:
        """Continue the run from `step`: forget later steps, close incidents and start a quiet period.

        Baselines keep what is still true (points up to `step`), so that a replayed step is not compared with its own
        spike. A detector that cannot go back starts again: a run that was rolled back must not be judged by incidents
        of the timeline it has left.
        """
        for detector in self._detectors:
            self._states[detector.name] = self._rolled_back(detector, step)
        self._state.context.cut(step)
        self._state.incidents.open.clear()
        self._state.quiet_until = step + QUIET_STEPS

    def _rolled_back(self, detector: Detector, step: int) -> Any:
        rolled_back = getattr(detector, "rolled_back", None)
        if rolled_back is None:
            return detector.start()
        try:
            return rolled_back(self._states[detector.name], step)
        except Exception:
            logger.exception(
                "detector %s cannot go back to step %s of run %s, begins anew", detector.name, step, self.run
            )
            self.failures[detector.name] += 1
            return detector.start()

    def dump(self) -> bytes:
        """The whole state, from which `load` continues exactly, also in another process."""
        states = {name: msgspec.Raw(codec.encode(state)) for name, state in self._states.items()}
        return msgspec.msgpack.encode(_Dump(pipeline=msgspec.Raw(codec.encode(self._state)), detectors=states))

    def load(self, data: bytes) -> None:
        """Continue from a `dump`. Raises `msgspec.DecodeError` or `ValidationError` and then changes nothing."""
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
        """Whether the drift's window contains a loss that the spike rule has already found."""
        first: int = symptom.evidence["window_steps"][0]
        return self._state.context.find("loss_spike", "act", since=first) is not None

    def _attribute(self, symptom: Symptom, modules: Sequence[str]) -> Attribution:
        try:
            return attribute(symptom, self._state.context, modules)
        except Exception:  # the symptom is known and must be reported, even without a cause
            if not self.failures["attribution"]:
                logger.exception("no cause could be weighed for %s of run %s", symptom.detector, self.run)
            self.failures["attribution"] += 1
            return Attribution(cause="unknown", evidence={"attribution": "failed"})

    def _is_explained(self, symptom: Symptom) -> bool:
        """Whether another detector that acts explains the error of a layer's GEMM."""
        since = symptom.onset_step - QUIET_STEPS
        return any(self._state.context.find(name, "act", since=since) is not None for name in EXPLAIN_SHADOW)

    def _incident_of(self, symptom: Symptom, sample: Sample) -> tuple[Incident | None, int]:
        """The open incident that a symptom belongs to (None: it opens another), and the onset of the event."""
        incident = self._state.incidents.open.get(symptom.detector)
        onset = symptom.onset_step
        if incident is None:
            return None, onset
        if incident.silent_samples > PAUSE_SAMPLES:
            incident.spell_onset = onset
        if _is_another(symptom, sample, incident):
            return None, onset if _is_elsewhere(symptom, sample, incident) else incident.spell_onset
        return incident, onset

    def _note(self, symptom: Symptom, sample: Sample) -> Finding | None:
        """Add a symptom to its incident; a finding when the incident opens or becomes a case to act."""
        incidents = self._state.incidents
        incident, onset = self._incident_of(symptom, sample)
        modules = list(dict.fromkeys([*(sample.tensors[i].module for i in symptom.tensors), *symptom.modules]))
        tensors = [sample.tensors[i].name for i in symptom.tensors]
        if incident is not None:
            _extend(incident, symptom, sample.step, modules, tensors)
            if incident.severity == "act" or symptom.severity == "warn":
                return None
        verdict = self._attribute(symptom, modules)
        if incident is None:
            incident = Incident(
                id=incidents.next_incident(),
                detector=symptom.detector,
                severity=symptom.severity,
                cause=verdict.cause,
                attempt=sample.attempt,
                onset_step=onset,
                spell_onset=onset,
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


def _extend(incident: Incident, symptom: Symptom, step: int, modules: list[str], tensors: list[str]) -> None:
    incident.last_seen_step, incident.silent_samples = step, 0
    incident.layers = modules + [layer for layer in incident.layers if layer not in modules]
    incident.tensors = tensors + [name for name in incident.tensors if name not in tensors]
    incident.evidence |= symptom.evidence


def _failed(detector: str, times: int, step: int) -> Symptom:
    """A detector that fails sees nothing, which must not look like nothing to see."""
    return Symptom(
        detector="blind",
        severity="warn",
        step=step,
        onset_step=step,
        evidence={"failed_detector": detector, "failures": times},
    )


def _is_another(symptom: Symptom, sample: Sample, incident: Incident) -> bool:
    """Whether a case to act is a different event from the one that the open incident warned of: in a tensor that the
    warning did not name, or after a pause.

    A weight that jumps while some gradients have clipped a little for a hundred steps did not begin with them. With
    their onset every checkpoint since would be tainted, and there would be nothing left to go back to.
    """
    if symptom.severity != "act" or incident.severity == "act" or not symptom.tensors:
        return False
    return _is_elsewhere(symptom, sample, incident) or incident.spell_onset > incident.onset_step


def _is_elsewhere(symptom: Symptom, sample: Sample, incident: Incident) -> bool:
    return sample.tensors[symptom.tensors[0]].name not in incident.tensors
