"""Whether all ranks begin: the last to come says so, or the first that cannot, for all alike."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from threaded_ranks import at_once

from fp8watch.errors import CheckpointError
from fp8watch.training.agreement import peers as meeting
from fp8watch.training.agreement.peers import Peers
from fp8watch.training.resume import refuse_together, resume_together


def ranks(store: Any, count: int) -> list[Peers]:
    """Each has a client of its own, as in a process of its own."""
    clients = [store] * count
    if isinstance(store, dist.TCPStore):
        clients = [dist.TCPStore("127.0.0.1", store.port) for _ in range(count)]
    return [Peers(dist.PrefixStore("ours", client), rank, count) for rank, client in enumerate(clients)]


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 3)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_all_begin_or_none_does(store):
    here = ranks(store, 3)
    assert at_once([lambda p=p: p.all_begin("0/5/1", "") for p in here]) == ["", "", ""]
    cannot = ["", "disk full", ""]
    said = at_once([lambda p=p, why=why: p.all_begin("0/10/1", why) for p, why in zip(here, cannot, strict=True)])
    assert said == ["rank 1: disk full"] * 3
    assert at_once([lambda p=p: p.all_begin("0/15/1", "") for p in here]) == ["", "", ""]


def test_a_rank_that_does_not_come_is_waited_for_once_and_finds_the_decision_when_it_does(monkeypatch):
    monkeypatch.setattr(meeting, "BEGIN_SECONDS", 1.5)
    monkeypatch.setattr(meeting, "IMPATIENT_SECONDS", 0.1)
    here = ranks(dist.HashStore(), 3)
    said = at_once([lambda p=p: p.all_begin("0/5/1", "") for p in here[:2]])
    assert said == ["not all ranks reached this save within 1.5 s"] * 2
    assert here[2].all_begin("0/5/1", "") == said[0]  # too late, and it does not begin alone
    began = time.monotonic()
    assert "0.1 s" in here[0].all_begin("0/10/1", "")
    assert time.monotonic() - began < 1.2
    assert at_once([lambda p=p: p.all_begin("0/15/1", "") for p in here]) == ["", "", ""]
    assert "1.5 s" in here[0].all_begin("0/20/1", "")


def test_a_store_that_is_gone_is_a_reason_not_to_begin():
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Broken pipe")

    here = Peers(Gone(), 1, 2)
    assert here.all_begin("0/5/1", "") == "rank 1: the job's store does not answer (RuntimeError)"
    here.decline("no room")
    assert here.declined() == ""


def test_what_a_rank_declines_is_known_to_the_others_without_waiting(store):
    here = ranks(store, 3)
    assert [p.declined() for p in here] == ["", "", ""]
    here[0].decline("run x saves into /ckpt")
    assert [p.declined() for p in here] == ["rank 0: run x saves into /ckpt"] * 3


def test_ranks_resume_nothing_when_one_cannot_use_the_checkpoints():
    class Manager:
        is_writer = False
        world_size = 2

    here = ranks(dist.HashStore(), 2)
    manager: Any = Manager()
    first, second = at_once(
        [
            lambda: refuse_together(here[0], "another run saves there", 10.0),
            lambda: resume_together(manager, here[1], 0, 10.0),
        ]
    )
    for error in (first, second):
        assert isinstance(error, CheckpointError)
        assert "another run saves there" in str(error)
    assert "rank 0" in str(second)
