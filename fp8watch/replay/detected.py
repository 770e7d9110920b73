"""The steps of any recording with what the detectors make of them: through the live controller's own code for runs of
ours, through the same detectors for other tools' logs."""

from __future__ import annotations

from collections.abc import Iterator

from fp8watch.detect.pipeline import Pipeline
from fp8watch.policy.view import Trouble, trouble_of
from fp8watch.replay.recording import Recording, Seen


def detected(recording: Recording) -> Iterator[Seen]:
    """Every step in order. Raises `BadInput` at the row that is wrong; what came before it has been yielded."""
    if recording.steps is not None:
        yield from recording.steps()
        return
    pipeline = Pipeline(recording.run)

    def troubles() -> tuple[Trouble, ...]:
        return tuple(
            trouble_of(incident, name=incident.id, finding=incident.findings[-1], evidence=incident.evidence)
            for incident in pipeline.open_incidents()
        )

    for sample in recording.samples:
        yield Seen(sample=sample, findings=pipeline.observe(sample), troubles=troubles)
