"""What happens on one rank alone must neither hang the others nor leave ranks in different states."""

from __future__ import annotations

import pytest
from fake_controller import Order
from real_ranks import Launch, command, in_turn, launch

NAMES = ["shards", "change-raises", "recheck-raises", "buckets", "buckets-alone", "idle-expert"]
HOLD = {"action": "hold_lr", "params": {"factor": 0.5}}
ORDERS = {
    "change-raises": [
        Order(
            command=command("change-raises", 1, "rollback", params={"onset_step": 9, "changes": [HOLD]}),
            after=10,
        )
    ],
    "recheck-raises": in_turn("recheck-raises", ("recheck", {})),
    "buckets": in_turn("buckets", ("recheck", {})),
    "idle-expert": [Order(command=command("idle-expert", 1, "repair_scale", params={"tensors": ["1:input"]}), after=8)],
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch("unlike_program.py", 2, NAMES, tmp_path_factory.mktemp("unlike"), ORDERS)


@pytest.mark.parametrize("name", NAMES)
def test_no_rank_is_held_up_and_none_stops(ranks: Launch, name: str) -> None:
    assert ranks.ends(name) == ["end", "end"]
    assert [ranks.lines(name, rank)[-1]["failures"] for rank in range(2)] == [{}, {}]


def test_a_change_that_raises_anything_on_one_rank_is_made_on_none(ranks: Launch) -> None:
    (order,) = ORDERS["change-raises"]
    assert ranks.statuses("change-raises", order) == [[("applied", "pending"), ("applied", "failed")]] * 2
    assert {line["rules"] for rank in range(2) for line in ranks.steps("change-raises", rank)} == {0}
    assert {line["attempt"] for rank in range(2) for line in ranks.steps("change-raises", rank)} == {0, 1}
    details = [ranks.controller.answers("change-raises", order.command)[rank][-1].detail for rank in range(2)]
    assert "RuntimeError: out of memory" in details[0]
    assert "failed on another rank" in details[1]


def test_a_recheck_that_cannot_be_run_on_one_rank_fails_on_all(ranks: Launch) -> None:
    (order,) = ORDERS["recheck-raises"]
    assert ranks.statuses("recheck-raises", order) == [[("failed", "pending")]] * 2


def test_a_recheck_leaves_nothing_in_the_buckets_that_gradients_live_in(ranks: Launch) -> None:
    (order,) = ORDERS["buckets"]
    assert ranks.statuses("buckets", order) == [[("applied", "pending"), ("applied", "ok")]] * 2
    for rank in range(2):
        losses, undisturbed = ([line["loss"] for line in ranks.steps(name, rank)] for name in NAMES[3:5])
        assert losses == undisturbed


def test_a_rank_without_a_clean_amax_says_so_and_stops_nobody(ranks: Launch) -> None:
    (order,) = ORDERS["idle-expert"]
    repaired, nothing = ranks.statuses("idle-expert", order)
    assert repaired == [("applied", "pending"), ("applied", "ok")]
    assert nothing[-1][0] == "applied"
