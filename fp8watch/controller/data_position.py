"""After a restart or rollback the count of consumed samples must continue from the checkpoint; a finding if it does
not.

When weights and optimizer come back but the data position does not, metrics look good on data that the model has
already seen, and collapse when new data arrives. The loss cannot show it in time; the counter shows it in the first
step.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8watch.detect.base import Sample
from fp8watch.records import CheckpointRecord, Finding


class DataPosition:
    """Called with every sample; checks the first one of an attempt that continues from an earlier step."""

    def __init__(self, run: str, attempt: int, step: int) -> None:
        self._run = run
        self._begins_after: int | None = None
        self.restarted(attempt, step)

    def restarted(self, attempt: int, step: int) -> None:
        """An attempt begins after `step` updates."""
        self._attempt = attempt
        self._begins_after = step if step > 0 else None

    def look(self, sample: Sample, checkpoints: Iterable[CheckpointRecord]) -> list[Finding]:
        """The finding about the first sample of the attempt, if any."""
        step, self._begins_after = self._begins_after, None
        samples = sample.scalars.get("samples")
        if step is None or samples is None:
            return []
        # A step that was passed twice, with batches left out, has several counts: only the least is certain.
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
