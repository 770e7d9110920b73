"""`conservative`, live: no update is finite, and before a person answers nothing is done to the run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from controller_sim import Box, Rank

from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.policy.load import read
from fp8watch.records import ActionRecord

TEXT = read("conservative")[0]
BAD = {"loss": math.nan, "grad_norm": math.nan}


def skipping(poisoned_from: int = 10_000) -> Callable[[int, Rank], dict[str, float]]:
    """From step 130 on no gradient is finite in FP8. Updates are skipped; from a step on they are not."""

    def numbers(step: int, rank: Rank) -> dict[str, float]:
        is_bad = step >= 130 and rank.attempt == 0 and "bf16_all" not in rank.in_force
        rank.is_broken = rank.is_broken or (is_bad and step >= poisoned_from)
        if rank.is_broken:
            return BAD | {"param_nonfinite": 1.0}
        return BAD | {"update_skipped": 1.0} if is_bad else {}

    return numbers


def asked(box: Box) -> ActionRecord:
    (waiting,) = [item for item in box.actions() if item.status == "waiting"]
    return waiting


def test_bf16_for_the_whole_model_waits_for_a_person_and_is_done_when_approved() -> None:
    box = Box(TEXT, numbers=skipping(), checkpoint_steps=range(20, 130, 20))
    box.run(300)
    assert [item.status for item in box.actions("skip_update")] == ["applied"] * 3 + ["unavailable"]
    waiting = asked(box)
    assert (waiting.action, waiting.mode, waiting.expires_step) == ("bf16_all", "approve", waiting.decided_step + 500)
    assert box.commanded() == []
    box.store.approve(Approval(run="r", action_id=waiting.id, verdict="approve", by="mara"))
    box.run(400)
    (done,) = box.actions("bf16_all")
    assert (done.id, done.status, done.outcome, done.answered_by) == (waiting.id, "applied", "helped", "mara")
    assert [action for _, _, action in box.commanded()] == ["bf16_all"]


def test_silence_is_a_no() -> None:
    box = Box(TEXT, numbers=skipping(), checkpoint_steps=range(20, 130, 20))
    box.run(900)
    assert [item.status for item in box.actions("bf16_all")] == ["expired"]
    assert "nobody answered in 500 steps" in box.actions("bf16_all")[0].reason
    assert box.commanded() == []


def test_parameters_that_become_nan_meanwhile_are_another_matter() -> None:
    box = Box(TEXT, numbers=skipping(poisoned_from=150), checkpoint_steps=range(20, 130, 20))
    box.run(160)
    waiting = asked(box)
    assert (waiting.rule, waiting.action) == ("poisoned-parameters", "rollback")
    assert [item.status for item in box.actions("bf16_all")] == ["expired"]
    assert box.commanded() == []
    box.run(260)
    assert [action for _, _, action in box.commanded()] == ["rollback"], "done after 50 steps without an answer"
    assert not box.rank.is_broken


@pytest.mark.parametrize("mode", ["approve", "observe"])
def test_a_controllers_cap_is_above_the_rungs_mode(mode: str) -> None:
    box = Box(TEXT, numbers=skipping(), security={"max_mode": mode})
    box.run(160)
    (record,) = box.actions("bf16_all" if mode == "approve" else "skip_update")
    assert record.status == {"approve": "waiting", "observe": "proposed"}[mode]
    assert box.commanded() == []


def test_a_controller_that_is_restarted_asks_again_and_does_nothing_before_the_answer() -> None:
    store = MemoryStore()
    first = Box(TEXT, numbers=skipping(), store=store)
    first.run(160)
    earlier = asked(first)
    second = Box(TEXT, numbers=skipping(), store=store)
    second.rank.step = 160
    second.run(200)
    again = asked(second)
    assert (again.action, again.mode) == ("bf16_all", "approve")
    assert [item.status for item in second.actions("bf16_all") if item.id == earlier.id] == ["expired"]
    assert second.commanded() == []
    store.approve(Approval(run="r", action_id=again.id, verdict="approve"))
    second.run(220)
    assert [action for _, _, action in second.commanded()] == ["bf16_all"]
