"""Non-finite numbers: skip, go back, never the same recovery twice, never to an empty store."""

from __future__ import annotations

import math

from controller_sim import Box, Rank

LADDER = """
version: 1
mode: auto
budgets: {actions_per_1000_steps: 10, rollbacks_per_24h: 5, rollbacks_per_checkpoint: 2}
rules:
  - name: nonfinite
    when: {detector: nonfinite, severity: act}
    ladder:
      - {action: skip_update, max_consecutive: 3}
      - {action: tighten_clip, max_norm: 1.0}
      - {action: rollback, settle_steps: 5}
      - {action: rollback, changes: [{action: bf16_all}], settle_steps: 5}
      - {action: halt}
"""
NAN = {"loss": math.nan, "grad_norm": math.nan, "param_nonfinite": 1.0}


def test_nan_in_the_first_batch_finds_nothing_to_roll_back_to() -> None:
    # case: NUM-01
    box = Box(LADDER, numbers=lambda step, rank: NAN)
    box.run(5)
    rollbacks = box.actions("rollback")
    assert [record.status for record in rollbacks] == ["unavailable", "unavailable"]
    assert all("nothing to roll back to" in record.reason for record in rollbacks)
    assert box.commanded() == [(1, "apply", "halt")]
    assert next(iter(box.store.runs())).state == "halted"


def test_late_nan_goes_the_ordinary_ladder() -> None:
    # case: NUM-01
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        rank.is_broken = rank.is_broken or (step == 250 and rank.attempt == 0)
        return NAN if rank.is_broken else {}

    box = Box(LADDER, numbers=numbers, checkpoint_steps=range(50, 300, 50))
    box.run(300)
    assert [(verb, action) for _, verb, action in box.commanded()] == [("apply", "rollback")]
    (record,) = [item for item in box.actions("rollback") if item.status == "applied"]
    assert record.params["checkpoint_step"] == 200
    assert record.readback == "ok"
    assert record.outcome == "helped"
    assert record.steps_replayed > 0


def deterministic(step: int, rank: Rank) -> dict[str, float]:
    """Goes wrong at step 80 for as long as the run is in FP8."""
    rank.is_broken = rank.is_broken or (step == 80 and "bf16_all" not in rank.in_force)
    return NAN if rank.is_broken else {}


def test_the_same_nan_twice_moves_up_the_ladder() -> None:
    # case: NUM-10
    box = Box(LADDER, numbers=deterministic, checkpoint_steps=(20, 40, 60))
    box.run(120)
    done = [item for item in box.actions("rollback") if item.status == "applied"]
    assert [bool(item.params["changes"]) for item in done] == [False, True]
    assert done[0].outcome == "no_effect"
    assert "recurred at step 80" in done[1].reason
    assert done[1].outcome == "helped"
    assert box.rank.step == 120
    assert not box.rank.halted


def test_when_nothing_helps_it_ends_in_a_halt_and_not_in_a_loop() -> None:
    # case: NUM-10
    def always(step: int, rank: Rank) -> dict[str, float]:
        rank.is_broken = rank.is_broken or step == 80
        return NAN if rank.is_broken else {}

    box = Box(LADDER, numbers=always, checkpoint_steps=(20, 40, 60))
    box.run(120)
    assert box.rank.halted
    assert [action for _, _, action in box.commanded()] == ["rollback", "rollback", "halt"]


def test_clipping_is_never_offered_for_a_norm_that_is_not_finite() -> None:
    # case: SPK-14
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        return {"loss": 1.23, "grad_norm": {30: 4.0, 31: 5e3, 32: 2e8, 33: math.nan}.get(step, 1.0)}

    box = Box(LADDER, numbers=numbers, checkpoint_steps=(10, 20))
    box.run(60)
    (clip,) = box.actions("tighten_clip")
    assert clip.status == "unavailable"
    assert "not finite" in clip.reason
    assert ("apply", "tighten_clip") not in [(verb, action) for _, verb, action in box.commanded()]


def test_a_skipped_update_needs_nothing_more() -> None:
    # case: SPK-14
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        return {"loss": math.nan, "grad_norm": math.nan, "update_skipped": 1.0} if step == 33 else {}

    box = Box(LADDER, numbers=numbers, checkpoint_steps=(10, 20))
    box.run(80)
    (skip,) = box.actions()
    assert (skip.action, skip.status, skip.readback, skip.outcome) == ("skip_update", "applied", "ok", "helped")
    assert skip.applied_step == 33
    assert box.commanded() == []


def test_a_skip_that_did_not_save_the_parameters_is_no_success() -> None:
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        rank.is_broken = rank.is_broken or (step == 33 and rank.attempt == 0)
        if not rank.is_broken:
            return {}
        return NAN | {"update_skipped": 1.0, "param_nonfinite": 0.0} if step == 33 else NAN

    box = Box(LADDER, numbers=numbers, checkpoint_steps=(10, 20))
    box.run(80)
    skip = box.actions("skip_update")[0]
    assert (skip.readback, skip.outcome) == ("failed", "no_effect")
    assert ("apply", "rollback") in [(verb, action) for _, verb, action in box.commanded()]


def test_endless_skipping_escalates() -> None:
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        is_bad = step >= 33 and rank.attempt == 0
        return {"loss": math.nan, "update_skipped": 1.0} if is_bad else {}

    box = Box(LADDER, numbers=numbers, checkpoint_steps=(10, 20))
    box.run(80)
    assert ("apply", "rollback") in [(verb, action) for _, verb, action in box.commanded()]
