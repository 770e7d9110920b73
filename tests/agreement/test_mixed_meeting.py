"""Ranks of different versions of fp8watch meet: they say so once, act on nothing, and wait for nobody."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from test_meeting import identity, in_threads, note

from fp8watch.checkpoints.bit_sums import LATEST, WEIGHTED
from fp8watch.settings import Settings
from fp8watch.training.agreement import AllRanks
from fp8watch.training.agreement import join as joining
from fp8watch.training.agreement.join import THIS_VERSION, Joined, Note, join, policy_digest, why_not


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (["0.1.0", "0.1.0"], None),
        (["0.1.0", "0.2.0"], "they run different versions of fp8watch (0.1.0 on rank 0, 0.2.0 on rank 1)"),
        (["", "0.2.0", ""], "they run different versions of fp8watch (an earlier one on rank 0, 0.2.0 on rank 1)"),
        (["", ""], None),
    ],
)
def test_versions_are_named_with_a_rank_of_each(versions: list[str], said: str | None) -> None:
    notes = [note(rank, version=version) for rank, version in enumerate(versions)]
    assert why_not(notes, has_agents=False) == (None if said is None else f"several ranks: {said}")


def old_note(rank: int) -> dict[str, Any]:
    """What the version before writes into the job's store."""
    return {
        "rank": rank, "host": "a", "run": "r", "attempt": 4, "acts": True, "policy": policy_digest("p", 1),
        "modules": policy_digest(), "start": f"start of {rank}",
    }  # fmt: skip


def meet(store: dist.Store, ranks: int, old: set[int]) -> dict[int, Joined]:
    for rank in old:
        store.set(f"m/modules/{policy_digest()}", "[]")
        store.set(f"m/note/{rank}", msgspec.json.encode(old_note(rank)).decode())
    new = sorted(set(range(ranks)) - old)
    settings = Settings(agreement_seconds=60.0)
    found = in_threads(len(new), lambda at: join(identity(new[at], ranks), settings, attempt=0, acts=True, policy="p"))
    return dict(zip(new, found, strict=True))


def test_a_rank_of_an_earlier_version_is_named_at_once_and_nothing_acts(store: dist.Store) -> None:
    began = time.monotonic()
    joined = meet(store, 4, {1, 3})
    assert time.monotonic() - began < 20, "no group is waited for"
    said = f"they run different versions of fp8watch ({THIS_VERSION} on rank 0, an earlier one on rank 1)"
    for mine in joined.values():
        assert mine.agreement.unavailable == f"several ranks: {said}"
        assert mine.attempt == 4
        assert mine.peers is not None
        assert mine.peers.algorithm == WEIGHTED, "its checkpoints are those that the other ranks can compare"
    assert joined[0].remark == (f"the ranks cannot act together: {said}; no action is taken, the run is only observed")
    assert joined[2].remark == "", "once"


def test_where_the_first_rank_is_the_older_one_the_first_newer_one_says_it(store: dist.Store) -> None:
    joined = meet(store, 3, {0})
    assert "an earlier one on rank 0" in joined[1].remark
    assert joined[2].remark == ""


def test_a_rank_of_an_earlier_version_does_not_wait_for_our_vote(store: dist.Store) -> None:
    """It knows of no versions; to it we have another policy, and it only observes too."""
    meet(store, 2, {1})
    ours = msgspec.json.decode(store.get("m/note/0"), type=Note)
    assert ours.policy != old_note(1)["policy"]


def test_ranks_of_one_version_act_together_and_say_nothing(
    store: dist.Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = meet(store, 2, set())
    assert all(isinstance(mine.agreement, AllRanks) and mine.remark == "" for mine in joined.values())
    assert [mine.peers.algorithm for mine in joined.values() if mine.peers] == [LATEST] * 2
    in_threads(2, lambda rank: (joined[rank].agreement.leave(0), joined[rank].agreement.close()))
    assert joining.remark_on_versions([note(0), note(1)], 0) == ""
