"""Parameters become NaN while the ladder for non-finite gradients is half climbed: the rule for that starts at its own
first rung, a rollback, and not at the height that another ladder had reached."""

from __future__ import annotations

import math

import pytest
from controller_sim import Box, Rank

from fp8watch.policy.load import read


@pytest.mark.parametrize("name", ["fp8-pretraining", "finetune"])
@pytest.mark.parametrize("poisoned_from", [134, 140])
def test_nan_in_the_parameters_goes_back_however_far_another_ladder_was_climbed(name: str, poisoned_from: int) -> None:
    # case: NUM-01
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        is_bad = step >= 130 and rank.attempt == 0
        rank.is_broken = rank.is_broken or (is_bad and step >= poisoned_from)
        if rank.is_broken:
            return {"loss": math.nan, "grad_norm": math.nan, "param_nonfinite": 1.0}
        return {"loss": math.nan, "grad_norm": math.nan, "update_skipped": 1.0} if is_bad else {}

    box = Box(read(name)[0], numbers=numbers, checkpoint_steps=range(20, 130, 20))
    box.run(300)
    assert [action for _, verb, action in box.commanded() if verb == "apply"] == ["adjust_loss_scale", "rollback"]
    (back,) = [item for item in box.actions("rollback") if item.status == "applied"]
    assert back.rule == "poisoned-parameters"
    assert not box.rank.halted
    assert not box.rank.is_broken
