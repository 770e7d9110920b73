"""The steps of any recording with their findings: by the live controller's own code for runs that fp8watch recorded, by
the same detectors for other tools' logs."""

from __future__ import annotations

from collections.abc import Iterator

from fp8watch.detect.pipeline import Pipeline
from fp8watch.policy.view import Trouble, trouble_of
from fp8watch.replay.lines import shown
from fp8watch.replay.recording import Recording, Seen


def detected(recording: Recording) -> Iterator[Seen]:
    """Every step in order. Raises `BadInput` at a bad row, after yielding the steps before it."""
    if recording.steps is not None:
        yield from _noting_lost_losses(recording, recording.steps())
        return
    pipeline = Pipeline(recording.run)

    for sample in recording.samples:
        yield Seen(sample=sample, findings=pipeline.observe(sample), troubles=lambda: open_troubles(pipeline))


def open_troubles(pipeline: Pipeline) -> tuple[Trouble, ...]:
    """The detectors' open incidents, as a policy sees them."""
    return tuple(
        trouble_of(incident, name=incident.id, finding=incident.findings[-1], evidence=incident.evidence)
        for incident in pipeline.open_incidents()
    )


def _noting_lost_losses(recording: Recording, steps: Iterator[Seen]) -> Iterator[Seen]:
    """Add a note on steps without a loss to a run that fp8watch recorded. The readers of logs do that themselves."""
    count = first = 0
    try:
        for seen in steps:
            if "loss" not in seen.sample.scalars:
                count, first = count + 1, first or seen.sample.step
            yield seen
    finally:
        if count:
            steps_have = "1 step has" if count == 1 else f"{count} steps have"
            recording.notes.append(f"{shown(recording.run)}: {steps_have} no loss (not observed), from step {first} on")
