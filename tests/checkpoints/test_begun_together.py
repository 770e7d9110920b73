"""A save in which ranks wait for each other is begun by all of them or by none; nobody sums up on training's thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from plain_run import PlainRun
from ranked_runs import Ranks, name_of
from threaded_ranks import at_once

from fp8watch.checkpoints import dcp, manifest, storage, together
from fp8watch.checkpoints.bit_sums import LATEST
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place
from fp8watch.checkpoints.storage import Poll, Prepared
from fp8watch.errors import CheckpointError


class Table:
    """What ranks, each a thread, settle between them."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._words: dict[tuple[int, str], str] = {}
        self.asked: list[tuple[int, str, str]] = []
        self.said = ""

    def of(self, rank: int) -> together.Together:
        return _Seat(self, rank)

    def ask(self, rank: int, about: str, cannot: str) -> str:
        self.asked.append((rank, about, cannot))
        self._words[rank, about] = cannot
        self._barrier.wait(20)
        return next((f"rank {r}: {why}" for (r, what), why in sorted(self._words.items()) if what == about and why), "")


class _Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    algorithm = LATEST

    def all_begin(self, about: str, cannot: str) -> str:
        return self._table.ask(self._rank, about, cannot)

    def declined(self) -> str:
        return self._table.said


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes `torch.distributed.checkpoint` a barrier of two, which waits for ever for a rank that does not come."""
    barrier, entered = threading.Barrier(2), []

    class Meeting:
        name = "dcp"
        writes_own_files = True

        def prepare(self, folder: Path, parts: TrainingParts, place: Place) -> Prepared:
            (folder / "dcp").mkdir(exist_ok=True)

            def begin() -> Poll:
                entered.append(place.rank)
                barrier.wait(5)
                return dict

            return Prepared(kept={}, begin=begin)

        def load(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    monkeypatch.setattr("fp8watch.checkpoints.manager.storage_of", lambda config: Meeting())
    return entered


def test_a_rank_that_cannot_begin_keeps_all_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meeting: list[int]
) -> None:
    table = Table(2)
    ranks = Ranks(tmp_path, together=table.of)
    ranks.step()
    real = Path.mkdir

    def full(self: Path, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == "bad":
            raise OSError(28, "No space left on device")
        real(self, *args, **kwargs)

    def on_a_full_disk() -> Any:
        threading.current_thread().name = "bad"
        return ranks.runs[1].manager.save(1)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        raised = at_once([lambda: ranks.runs[0].manager.save(1), on_a_full_disk])
    for error in raised:
        assert isinstance(error, CheckpointError)
        assert "rank 1" in str(error)
        assert "No space left" in str(error)
    assert meeting == []
    assert ranks.runs[0].manager.pending == []
    ranks.step()
    labels = at_once([lambda run=run: run.manager.save(2).label for run in ranks])
    assert labels == ["pending", "pending"] or "candidate" in labels
    ranks.runs[0].manager.poll()
    assert [record.checkpoint for record in ranks.runs[0].manager.records()] == [name_of(2)]
    assert sorted(meeting) == [0, 1]


def test_one_that_has_saved_the_step_already_keeps_the_other_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meeting: list[int]
) -> None:
    """By an action and by the cadence: the two ranks see the first one end differently."""
    table = Table(2)
    ranks = Ranks(tmp_path, together=table.of)
    ranks.step()
    at_once([lambda run=run: run.manager.save(1) for run in ranks])
    monkeypatch.setattr(ranks.runs[1].manager, "_saved_before", lambda attempt, step: None)
    first, second = at_once([lambda run=run: run.manager.save(1) for run in ranks])
    assert first.checkpoint == name_of(1)
    assert isinstance(second, CheckpointError)
    assert "saved already" in str(second)
    assert sorted(meeting) == [0, 1]
    assert len({about for _, about, _ in table.asked}) == 2  # a question of its own


def test_a_rank_that_saves_nothing_at_all_is_said_by_the_others(tmp_path: Path) -> None:
    table = Table(2)
    ranks = Ranks(tmp_path, together=table.of)
    ranks.step()
    table.said = "rank 0: another run saves there"
    for run in ranks:
        with pytest.raises(CheckpointError, match="rank 0: another run saves there"):
            run.manager.save(1)
    assert not list(tmp_path.glob("*step*"))


def test_ranks_that_cannot_ask_each_other_begin_nothing_that_needs_all(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, format="dcp")
    ranks.step()
    for run in ranks:
        with pytest.raises(CheckpointError, match="cannot ask each other"):
            run.manager.save(1)


def test_ranks_that_save_alone_ask_nobody(tmp_path: Path) -> None:
    table = Table(2)
    ranks = Ranks(tmp_path, together=table.of)
    ranks.step()
    assert ranks.save(1) == ["pending", "pending"]
    assert table.asked == []


def test_a_background_save_that_is_not_begun_leaves_no_thread(tmp_path: Path) -> None:
    run = PlainRun(tmp_path, format="dcp", background=True)
    before = threading.active_count()
    prepared = dcp.DcpStorage(background=True).prepare(tmp_path, run.parts, Place())
    assert threading.active_count() == before + 1
    prepared.cancel()
    for thread in threading.enumerate():
        if thread.name == "fp8watch-save":
            thread.join(10)
    assert threading.active_count() == before
    assert not list((tmp_path / "dcp").iterdir())


# Who sums up


def summed_up_on(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    real = module.measure

    def measure(path: Path) -> Any:
        seen.append((path.name, threading.current_thread().name))
        return real(path)

    monkeypatch.setattr(module, "measure", measure)
    return seen


def test_files_written_in_the_background_are_summed_up_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = summed_up_on(monkeypatch, dcp)
    run = PlainRun(tmp_path, format="dcp", background=True)
    run.run(1)
    name = run.save()
    run.manager._finish(20.0)
    assert {file for file, _ in seen} == {".metadata", "__0_0.distcp"}
    assert {thread for _, thread in seen} == {"fp8watch-save"}
    assert run.manager.restore(name).step == 1


def test_what_the_user_has_written_in_the_background_is_summed_up_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where training waits for the save, it waits for the sums as well."""
    seen = summed_up_on(monkeypatch, storage)
    futures: list[Future[None] | None] = [None, Future()]

    def save(folder: Path) -> Any:
        (folder / "mine.bin").write_bytes(b"x" * 100)
        return futures[run.step_number - 1]

    run = PlainRun(tmp_path, save=save, load=lambda folder: None)
    run.run(1)
    run.save()
    assert seen == [("mine.bin", threading.current_thread().name)]
    run.run(1)
    assert run.manager.save(2).label == "pending"
    future = futures[1]
    assert future is not None
    future.set_result(None)
    run.manager._finish(20.0)
    assert seen[1:] == [("mine.bin", "fp8watch-save")]
    assert "user/mine.bin" in manifest.read(tmp_path / name_of(2)).files


def test_every_file_is_looked_at_by_exactly_one_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, save=lambda folder: (folder / "f").write_bytes(b"1"), load=lambda folder: None)
    ranks.step()
    ranks.save(1)
    for _ in range(100):
        ranks.runs[0].manager.poll()
        if ranks.runs[0].manager.pending == []:
            break
        threading.Event().wait(0.05)
    found = manifest.read(tmp_path / name_of(1))
    shares = [manifest.share_of(found, rank) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(found.files)
    assert all("state-0000" in "".join(share) for share in shares)
