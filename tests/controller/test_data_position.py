"""A restart or rollback after which the data starts again is a finding in its first step."""

from __future__ import annotations

import pytest

from fp8watch.controller.service import RunController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.records import CheckpointRecord, Finding, Hello, StepFrame

BATCH = 8


def restarted(first_count: float | None, *, has_position: bool = True) -> list[Finding]:
    """A run that goes on after step 60 in a new process, its first step telling `first_count` samples."""
    store = MemoryStore()
    for attempt, step in ((0, 0), (1, 60)):
        controller = RunController(store, clock=lambda: 1.0)
        controller.receive(
            Hello(
                wire_version=1, run="r", attempt=attempt, rank=0, local_rank=0, world_size=1, pid=attempt, host="h",
                time_unix=1.0, step=step,
            )
        )  # fmt: skip
        for number in range(step + 1, step + 71):
            scalars = {"loss": 2.0}
            if attempt == 0:
                scalars["samples"] = float(number * BATCH)
            elif first_count is not None:
                scalars["samples"] = first_count + (number - 61) * BATCH
            frame = StepFrame(
                run="r", attempt=attempt, rank=0, step=number, layout_id=0, time_unix=1.0, scalars=scalars
            )
            controller.receive(frame)
            if attempt == 0 and number % 20 == 0:
                record = CheckpointRecord(
                    run="r", attempt=0, checkpoint=f"c{number}", step=number, path="/c", label="candidate",
                    has_data_position=has_position, samples=number * BATCH,
                )  # fmt: skip
                controller.receive(record)
    return list(store.read("r", Finding))


@pytest.mark.parametrize("count", [BATCH, 60 * BATCH])
def test_a_reset_of_the_consumed_samples_is_a_finding(count: int) -> None:  # case: CKP-06
    (found,) = restarted(count)
    assert (found.detector, found.cause, found.severity) == ("no_progress", "data", "warn")
    assert (found.step, found.onset_step) == (61, 61)
    assert (found.evidence["samples"], found.evidence["consumed_before"]) == (count, 480)


@pytest.mark.parametrize("count", [61 * BATCH, 75 * BATCH, None])
def test_samples_that_go_on_or_skip_ahead_or_are_not_counted_are_none(count: int | None) -> None:  # case: CKP-06
    assert restarted(count) == []


def test_without_a_position_in_the_checkpoint_nothing_is_claimed() -> None:
    assert restarted(BATCH, has_position=False) == []
