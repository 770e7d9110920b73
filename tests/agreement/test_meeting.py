"""Who may act together, and the groups they use; ranks are threads over a store in this process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from fp8watch.identity import Identity
from fp8watch.settings import Settings
from fp8watch.training.agreement import AllRanks, ObserveOnly, SingleProcess
from fp8watch.training.agreement import join as joining
from fp8watch.training.agreement import start as starting
from fp8watch.training.agreement.gloo import TwoLevels, shorten
from fp8watch.training.agreement.join import Note, join, transport, why_not
from fp8watch.training.agreement.peers import PeersLost
from fp8watch.training.agreement.transport import TransportLost

T = TypeVar("T")


def note(rank: int, **fields: Any) -> Note:
    values = {"rank": rank, "host": "a", "run": "r", "attempt": 0, "acts": True, "policy": "p", **fields}
    return Note(**values)


@pytest.mark.parametrize(
    ("other", "has_agents", "reason"),
    [
        ({}, False, None),
        ({"acts": False}, False, "several ranks: the policy of rank 1 only observes"),
        ({"policy": "q"}, False, "several ranks: they were given different policies"),
        ({"run": "s"}, False, "several ranks: they have different run names; set FP8WATCH_RUN to one name on all"),
        ({"host": "b"}, True, None),
        (
            {"host": "b"},
            False,
            "several nodes: each needs an agent that takes commands from one controller (FP8WATCH_AGENT)",
        ),
    ],
)
def test_who_may_act_together(other, has_agents, reason):
    assert why_not([note(0), note(1, **other)], has_agents=has_agents) == reason


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    found: dict[int, T] = {}
    threads = [threading.Thread(target=lambda r=rank: found.update({r: work(r)})) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(count)]


def identity(rank: int, ranks: int = 2) -> Identity:
    return Identity(run="r", rank=rank, world_size=ranks, host="a")


def test_one_process_needs_nobody():
    joined = join(identity(0, 1), Settings(), attempt=3, acts=True, policy="p")
    assert isinstance(joined.agreement, SingleProcess)
    assert joined.attempt == 3


def test_ranks_that_act_meet_and_begin_the_highest_attempt(store):
    joined = in_threads(2, lambda r: join(identity(r), Settings(), attempt=r, acts=True, policy="p"))
    assert all(isinstance(j.agreement, AllRanks) and j.attempt == 1 for j in joined)
    verdicts = in_threads(2, lambda r: joined[r].agreement.any_bad(r == 1, may_act=True))
    assert verdicts == [True, True]
    assert in_threads(2, lambda r: joined[r].agreement.any_bad(True, may_act=r == 0)) == [False, False]
    in_threads(2, lambda r: (joined[r].agreement.leave(0), joined[r].agreement.close()))


def test_a_rank_that_never_attaches_leaves_the_run_observed(store):
    joined = join(identity(0), Settings(join_seconds=0.2), attempt=0, acts=True, policy="p")
    assert joined.agreement.unavailable == "several ranks: not all of them attached within 0.2 s"


# case: COM-04
def test_an_observing_rank_waits_for_nobody_and_tells_the_acting_ones(store):
    observer = join(identity(1), Settings(), attempt=0, acts=False, policy="p").agreement
    assert isinstance(observer, ObserveOnly)
    assert observer.unavailable is None
    actor = join(identity(0), Settings(), attempt=0, acts=True, policy="p").agreement
    assert actor.unavailable == "several ranks: the policy of rank 1 only observes"


# case: COM-01
def test_a_rank_that_does_not_come_is_given_up_after_the_time_set(store):
    settings = Settings(agreement_seconds=0.5)
    first, _ = (
        j.agreement for j in in_threads(2, lambda r: join(identity(r), settings, attempt=0, acts=True, policy="p"))
    )
    said: list[str] = []
    first.on_over = said.append
    first.due([], 1)
    assert first.settle(2) is None
    assert said == ["the ranks can no longer agree on actions: a rank did not come within 0.5 s"]
    assert first.unavailable == said[0]


def test_two_levels_reduce_over_all_ranks_and_fall_together(store):
    """Two nodes of two ranks each; the threshold of 64 lowered."""
    notes = [note(rank, host="ab"[rank // 2]) for rank in range(4)]
    wires = in_threads(4, lambda r: transport(joining._store(""), "votes", notes, r, seconds=5.0, flat_up_to=3))
    assert all(isinstance(wire, TwoLevels) for wire in wires)
    for number in range(3):
        reduced = in_threads(4, lambda r, n=number: wires[r].start([r + n, -r]).wait(5.0))
        assert reduced == [[number, -3]] * 4
    wires[3].close()

    def lost(rank: int) -> bool:
        try:
            wires[rank].start([0, 0]).wait(10.0)
        except TransportLost:
            return True
        return False

    assert in_threads(3, lost) == [True, True, True]
    for wire in wires:
        wire.close()


def test_what_gloo_says_is_cut_to_what_a_person_needs():
    text = "[/__w/x/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a remote worker"
    assert shorten(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:1"


@pytest.fixture
def kept_store(monkeypatch) -> dist.Store:
    """That of a torchrun which gives it to the ranks of all its starts; each of them counts its attaches anew."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    monkeypatch.setattr(joining, "_store", lambda meeting: dist.PrefixStore(meeting, store))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    return store


def words_of_a_start(monkeypatch: pytest.MonkeyPatch, number: int) -> list[list[str]]:
    """What two ranks hear of each other in a start, of which the second comes later."""
    monkeypatch.setattr(joining, "_meetings", iter([0, 0]))
    joined = [join(identity(rank), Settings(), attempt=0, acts=False, policy="p") for rank in range(2)]

    def exchange(rank: int) -> list[str]:
        time.sleep(0.2 * rank)
        peers = joined[rank].peers
        assert peers is not None
        return peers.exchange(f"{number}.{rank}", 10.0)

    return in_threads(2, exchange)


def test_ranks_that_torchrun_has_restarted_hear_nothing_of_those_before_them(kept_store, monkeypatch, caplog):
    for number in range(3):
        assert words_of_a_start(monkeypatch, number) == [[f"{number}.0", f"{number}.1"]] * 2
    assert "an earlier start" not in caplog.text


def test_where_starts_cannot_be_told_apart_it_is_said(kept_store, monkeypatch, caplog):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    words_of_a_start(monkeypatch, 0)
    assert "an earlier start" not in caplog.text
    words_of_a_start(monkeypatch, 1)
    assert caplog.text.count("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 2


def a_start(monkeypatch: pytest.MonkeyPatch, work: Callable[[int], T], *, ranks: int = 2) -> list[T]:
    """Ranks of a start; that of the highest number comes first, and rank 0 last."""
    monkeypatch.setattr(joining, "_meetings", itertools.repeat(0))

    def come(rank: int) -> T:
        time.sleep(0.1 * (ranks - 1 - rank))
        return work(rank)

    return in_threads(ranks, come)


def test_restarted_ranks_act_together_from_what_they_say_themselves(kept_store, monkeypatch, caplog):
    """An earlier start went further: its words would have them begin attempt 8, each after it with others."""
    for attempts in ([7, 8, 6], [2, 1, 0], [3, 3, 3]):
        acting = lambda r, a=attempts: join(identity(r, 3), Settings(), attempt=a[r], acts=True, policy="p")  # noqa: E731
        joined = a_start(monkeypatch, acting, ranks=3)
        assert all(isinstance(j.agreement, AllRanks) and j.attempt == max(attempts) for j in joined), joined
        assert in_threads(3, lambda r, j=joined: j[r].agreement.any_bad(r == 1, may_act=True)) == [True] * 3
        words = in_threads(3, lambda r, j=joined, a=attempts: j[r].peers.exchange(f"{a[r]}", 10.0))
        assert words == [[str(attempt) for attempt in attempts]] * 3
        in_threads(3, lambda r, j=joined: (j[r].agreement.leave(0), j[r].agreement.close()))
    assert "an earlier start" not in caplog.text


@pytest.mark.parametrize("observer", [0, 1])
def test_an_observing_rank_is_known_at_once_and_speaks_with_the_others(kept_store, monkeypatch, observer):
    monkeypatch.setattr(starting, "HEED_SECONDS", 1.0)
    began = time.monotonic()
    joined = a_start(
        monkeypatch, lambda r: join(identity(r, 3), Settings(), attempt=0, acts=r != observer, policy="p"), ranks=3
    )
    assert time.monotonic() - began < 20  # of 60
    said = f"several ranks: the policy of rank {observer} only observes"
    assert [j.agreement.unavailable for j in joined] == [None if r == observer else said for r in range(3)]
    assert in_threads(3, lambda r: joined[r].peers.exchange(str(r), 10.0)) == [["0", "1", "2"]] * 3
    # The next start's policy acts on all of them: the word of the observer is one of those before.
    monkeypatch.setattr(starting, "HEED_SECONDS", 5.0)
    again = a_start(monkeypatch, lambda r: join(identity(r, 3), Settings(), attempt=0, acts=True, policy="p"), ranks=3)
    assert all(isinstance(j.agreement, AllRanks) for j in again), again
    in_threads(3, lambda r: again[r].agreement.close())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_restarted_rank_that_finds_no_other_leaves_the_run_observed(kept_store, monkeypatch, rank):
    a_start(monkeypatch, lambda r: join(identity(r), Settings(), attempt=0, acts=True, policy="p").agreement.close())
    joined = join(identity(rank), Settings(join_seconds=0.3), attempt=0, acts=True, policy="p")
    assert joined.agreement.unavailable == "several ranks: not all of them attached within 0.3 s"
    with pytest.raises(PeersLost, match="not all ranks answered"):
        joined.peers.exchange("alone", 0.3)
