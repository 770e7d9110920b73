"""When a rank is lost and when the process ends."""

from __future__ import annotations

import pytest

from fp8watch_agent.lifecycle import Lifecycle

A, B = ("run", 0), ("run", 1)


@pytest.fixture
def life() -> Lifecycle:
    return Lifecycle(is_embedded=True, started=100.0, connect_seconds=20.0, end_grace_seconds=10.0)


def test_nobody_comes(life: Lifecycle) -> None:
    assert not life.is_over(119.0)
    assert life.is_over(121.0)
    assert life.is_over(101.0, is_parent_gone=True)


def test_all_say_goodbye(life: Lifecycle) -> None:
    life.connected(A)
    life.connected(B)
    life.goodbye(A)
    assert life.closed(A, 200.0)
    assert not life.is_over(200.0)
    life.goodbye(B)
    assert life.closed(B, 201.0)
    assert life.is_run_over("run")
    assert life.is_over(201.0)
    assert life.newly_lost(1e9) == []


def test_a_silent_end_is_a_loss_within_the_grace_time(life: Lifecycle) -> None:
    life.connected(A)
    assert not life.closed(A, 200.0)
    assert life.newly_lost(204.9) == []
    assert not life.is_over(204.9)
    assert life.newly_lost(205.0) == [A]
    assert life.newly_lost(206.0) == []
    assert life.is_over(206.0)


def test_a_rank_may_come_back(life: Lifecycle) -> None:
    life.connected(A)
    life.closed(A, 200.0)
    life.connected(A)
    assert life.newly_lost(300.0) == []
    assert not life.is_over(300.0, is_parent_gone=True)


def test_goodbye_holds_for_one_connection_only(life: Lifecycle) -> None:
    life.connected(A)
    life.goodbye(A)
    life.connected(A)
    assert not life.closed(A, 200.0)


def test_one_rank_lost_while_the_other_goes_on(life: Lifecycle) -> None:
    life.connected(A)
    life.connected(B)
    life.closed(B, 200.0)
    assert life.newly_lost(206.0) == [B]
    assert not life.is_run_over("run")
    assert life.num_connected == 1
    assert not life.is_over(206.0)


def test_a_standing_agent_is_never_over() -> None:
    life = Lifecycle(is_embedded=False, started=0.0, connect_seconds=1.0, end_grace_seconds=1.0)
    assert not life.is_over(1e9)
    life.connected(A)
    life.goodbye(A)
    life.closed(A, 1.0)
    assert not life.is_over(1e9)
    assert life.is_run_over("run")
