"""After a restart or a rollback the count of consumed samples goes on from the checkpoint; one that does not is said.

Weights and optimizer come back and the data position does not: metrics look good on data that the model has seen, and
collapse when new data comes. The loss cannot show it in time; the counter shows it in the first step.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8watch.detect.base import Sample
from fp8watch.records import CheckpointRecord, Finding


class DataPosition:
    """Asked at every sample; looks at the first of an attempt that goes on from a step."""

    def __init__(self, run: str, attempt: int, step: int) -> None:
        self._run = run
        self._begins_after: int | None = None
        self.restarted(attempt, step)

    def restarted(self, attempt: int, step: int) -> None:
        """An attempt begins after `step` updates."""
        self._attempt = attempt
        self._begins_after = step if step > 0 else None

    def look(self, sample: Sample, checkpoints: Iterable[CheckpointRecord]) -> list[Finding]:
        """What is wrong with the first sample of the attempt, if anything is."""
        step, self._begins_after = self._begins_after, None
        samples = sample.scalars.get("samples")
        if step is None or samples is None:
            return []
        # A step that was gone through twice with batches left out has several counts: the least is certain.
        saved = [record.samples for record in checkpoints if record.step == step and record.has_data_position]
        if not saved or samples > (consumed := min(saved)):
            return []
        finding = Finding(
            id=f"data-{self._attempt}", incident=f"data-{self._attempt}", run=self._run, attempt=sample.attempt,
            step=sample.step, onset_step=step + 1, detector="no_progress", severity="warn", cause="data",
            evidence={
                "samples": samples, "consumed_before": consumed,
                "for": [f"{consumed} samples were consumed by step {step}, and now it is {samples:.0f}: data repeats"],
            },
        )  # fmt: skip
        return [finding]
