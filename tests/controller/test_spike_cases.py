"""Spikes that heal and spikes that do not, and a run that always diverges again: patience, and limits that hold."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from controller_sim import Box, Signal

from fp8watch.detect.base import Sample

PATIENT = """
version: 1
mode: auto
budgets: {actions_per_1000_steps: 50, rollbacks_per_24h: 3, rollbacks_per_checkpoint: 9}
rules:
  - name: patient
    when: {detector: loss_spike, severity: act, for_steps: 350}
    ladder: [{action: rollback, settle_steps: 10}]
  - name: again
    when: {detector: divergence, severity: act}
    ladder: [{action: rollback, settle_steps: 10}]
"""


def box(script, **more: object) -> Box:
    return Box(
        PATIENT, numbers=lambda step, rank: {}, script=script, layers=("a",), checkpoint_steps=range(50, 1500, 50),
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(("length", "rollbacks"), [(300, 0), (10_000, 1)])
def test_a_spike_that_heals_within_the_patience_is_left_alone(length: int, rollbacks: int) -> None:  # case: SPK-01
    def script(sample: Sample) -> Iterable[Signal]:
        is_high = 200 <= sample.step < 200 + length and sample.attempt == 0
        return [("loss_spike", "unknown", ())] if is_high else []

    scene = box(script)
    scene.run(700)
    assert [action for _, _, action in scene.commanded()] == ["rollback"] * rollbacks


def test_a_run_that_always_diverges_again_is_rolled_back_three_times_and_no_more() -> None:  # case: SPK-06
    begun: dict[int, int] = {}

    def script(sample: Sample) -> Iterable[Signal]:
        begun.setdefault(sample.attempt, sample.step)
        return [("divergence", "unknown", ())] if sample.step >= begun[sample.attempt] + 60 else []

    scene = box(script)
    scene.run(900)
    assert [action for _, _, action in scene.commanded()] == ["rollback"] * 3
    refused = [record for record in scene.actions("rollback") if record.status == "refused"]
    assert refused
    assert "3 of 3 rollbacks" in refused[-1].reason
