"""A rollback that would skip too many batches is passed over with the reason, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from fp8watch.policy.fill import NotNow, fill
from fp8watch.policy.load import parse
from fp8watch.policy.state import PolicyState
from fp8watch.policy.view import Trouble, View
from fp8watch.records import CheckpointRecord
from fp8watch.vocabulary import MAX_SKIP_BATCHES


def filled(onset: int, **rung: Any) -> dict[str, Any]:
    """The parameters of a rollback to step 100 with this rung."""
    given = "".join(f", {name}: {str(value).lower()}" for name, value in rung.items())
    rule = f"  - name: a\n    when: {{detector: loss_spike}}\n    ladder: [{{action: rollback{given}}}]\n"
    policy = parse("version: 1\nrules:\n" + rule)
    trouble = Trouble(
        incident="i1", detector="loss_spike", cause="data", severity="act", onset_step=onset, first_step=onset,
        last_seen_step=onset, finding="f1",
    )  # fmt: skip
    saved = CheckpointRecord(
        run="r", attempt=0, checkpoint="step-100", step=100, path="/c", label="good", has_data_position=True
    )
    view = View(run="r", step=onset + 1, seen=onset + 1, troubles=(trouble,), checkpoints=(saved,))
    return fill(policy, PolicyState(), view, policy.rules[0].ladder[0], trouble)[0]


def test_what_adds_up_is_bounded_and_not_its_parts_alone() -> None:
    assert filled(110, skip_batches=5)["skip_batches"] == 5
    assert filled(110, skip_batches=5, skip_to_onset=True)["skip_batches"] == 15
    at_most = 100 + MAX_SKIP_BATCHES - 5
    assert filled(at_most, skip_batches=5, skip_to_onset=True)["skip_batches"] == MAX_SKIP_BATCHES
    with pytest.raises(
        NotNow, match=f"{MAX_SKIP_BATCHES + 1} batches would be left out between step-100 and the onset"
    ):
        filled(at_most + 1, skip_batches=5, skip_to_onset=True)
