"""Model and optimizer written by somebody else: distributed checkpoints, in the background too, and callbacks."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_run import PlainRun

from fp8watch.checkpoints import Checkpoints, dcp, manifest
from fp8watch.checkpoints.trial import MAX_TRIALS
from fp8watch.errors import CheckpointError


def finish(run: PlainRun, seconds: float = 20.0) -> None:
    run.manager.close(seconds)
    assert run.manager.pending == []


def keep_polling(run: PlainRun, seconds: float = 20.0) -> None:
    """What the training does at its boundaries while a save is under way; raises what the save raised."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        run.manager.poll()
        time.sleep(0.02)


@pytest.mark.parametrize("background", [False, True])
def test_a_distributed_checkpoint_brings_everything_back(tmp_path: Path, background: bool) -> None:
    run = PlainRun(tmp_path, format="dcp", background=background)
    run.run(3)
    name, before = run.save(), run.bits()
    losses = run.run(3)
    finish(run)
    assert run.manager.restore(name).step == 3
    assert run.bits() == before
    assert run.run(3) == losses
    files = manifest.read(tmp_path / name).files
    assert {"dcp/.metadata", "dcp/__0_0.distcp", "state.pt"} == set(files)


def test_a_new_process_reads_it_with_an_optimizer_that_has_made_no_step(tmp_path: Path) -> None:
    run = PlainRun(tmp_path, format="dcp")
    run.run(3)
    run.save()
    before, losses = run.bits(), run.run(3)
    other = PlainRun(tmp_path, format="dcp")
    record = other.manager.newest_usable()
    assert record is not None
    other.manager.restore(record.checkpoint)
    assert other.bits() == before
    assert other.run(3) == losses


class _Hostile:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_that_somebody_put_there_is_not_run(tmp_path: Path) -> None:
    """Even where he has made the manifest agree with it."""
    run = PlainRun(tmp_path / "c", format="dcp")
    run.run(1)
    name = run.save()
    metadata = tmp_path / "c" / name / "dcp" / ".metadata"
    pickle.loads(pickle.dumps(_Hostile(tmp_path / "proof")))
    assert (tmp_path / "proof").exists(), "it would run"
    (tmp_path / "proof").unlink()
    metadata.write_bytes(pickle.dumps(_Hostile(tmp_path / "proof")))
    before = run.bits()
    with pytest.raises(CheckpointError, match="metadata asks for"):
        dcp.DcpStorage(background=False).load(
            tmp_path / "c" / name, run.parts, dcp.DcpStorage(background=False).kept(run.parts)
        )
    assert not (tmp_path / "proof").exists()
    assert run.bits() == before


@pytest.mark.parametrize("damage", ["flipped", "missing", "truncated"])
def test_damage_to_its_files_is_refused_with_nothing_overwritten(tmp_path: Path, damage: str) -> None:
    run = PlainRun(tmp_path, format="dcp")
    run.run(1)
    older = run.save()
    run.run(1)
    name = run.save()
    file = tmp_path / name / "dcp" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data[:-1] if damage == "truncated" else data)
    report = run.manager.restore(name)
    assert report.checkpoint == older
    assert list(report.refused) == [name]


# case: CKP-03
def test_in_the_background_it_is_no_target_and_removes_nothing_until_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the step is saved, though training has gone on since; the only older one stays until then."""
    run = PlainRun(tmp_path, format="dcp", background=True, keep=1)
    run.run(2)
    first = run.save()
    finish(run)
    gate, real = threading.Event(), dcp._dcp.save

    def slow(*args: Any, **kwargs: Any) -> Any:
        gate.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(dcp._dcp, "save", slow)
    run.run(2)
    bits = run.bits()
    second = run.manager.save(4)
    assert second.label == "pending"
    run.run(3)
    run.manager.poll()
    assert [record.label for record in run.manager.records()] == ["candidate", "pending"]
    assert (tmp_path / first).exists()
    with pytest.raises(CheckpointError, match="pending"):
        run.manager.restore(second.checkpoint)
    newest = run.manager.newest_usable()
    assert newest is not None
    assert newest.checkpoint == first
    assert run.manager.label(second.checkpoint, "good").label == "pending"  # only the one who saves knows
    gate.set()
    finish(run)
    assert [record.checkpoint for record in run.manager.records()] == [second.checkpoint]
    assert not (tmp_path / first).exists()
    run.manager.restore(second.checkpoint)
    assert run.bits() == bits


# case: CKP-20
def test_a_background_save_that_fails_is_said_at_the_next_boundary_and_never_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PlainRun(tmp_path, format="dcp", background=True)
    told: list[tuple[str, str]] = []
    run.manager.on_change = lambda record: told.append((record.label, record.path))

    gate = threading.Event()

    def fail(*args: Any, **kwargs: Any) -> None:
        gate.wait(30)
        raise OSError("too many shared-memory handles")

    monkeypatch.setattr(dcp._dcp, "save", fail)
    run.run(1)
    pending = run.manager.save(1)
    run.step()
    run.manager.poll()
    gate.set()
    with pytest.raises(CheckpointError, match="too many shared-memory handles"):
        keep_polling(run)
    assert run.manager.records() == []
    assert [label for label, _ in told] == ["pending", "tainted"]
    assert told[-1][1] == ""
    assert not (tmp_path / pending.checkpoint).exists()
    assert not list(tmp_path.glob(".unfinished*"))


class Own:
    """A user's own way to save, and what it was asked for."""

    def __init__(self, run: list[PlainRun], pool: ThreadPoolExecutor | None = None) -> None:
        self._run, self._pool = run, pool
        self.gate = threading.Event()

    def save(self, folder: Path) -> Future[None] | None:
        run = self._run[0]
        state = {"model": [p.detach().clone() for p in run.model.parameters()], "moments": run.optimizer.state_dict()}
        if self._pool is None:
            torch.save(state, folder / "mine.pt")
            return None

        def later() -> None:
            self.gate.wait(30)
            torch.save(state, folder / "mine.pt")

        return self._pool.submit(later)

    def load(self, folder: Path) -> None:
        run = self._run[0]
        state = torch.load(folder / "mine.pt")
        with torch.no_grad():
            for live, saved in zip(run.model.parameters(), state["model"], strict=True):
                live.copy_(saved)
        run.optimizer.load_state_dict(state["moments"])


def test_what_the_user_saves_is_summed_up_and_restored(tmp_path: Path) -> None:
    box: list[PlainRun] = []
    own = Own(box)
    run = PlainRun(tmp_path, save=own.save, load=own.load)
    box.append(run)
    run.run(2)
    older = run.save()
    losses = run.run(2)
    run.manager.restore(older)
    assert run.run(2) == losses
    name = run.save()
    file = tmp_path / name / "user" / "mine.pt"
    file.write_bytes(file.read_bytes()[:-1])
    assert run.manager.restore(name).checkpoint == older


def test_a_callback_that_returns_a_future_is_pending_until_it_is_done(tmp_path: Path) -> None:
    box: list[PlainRun] = []
    with ThreadPoolExecutor(1) as pool:
        own = Own(box, pool)
        run = PlainRun(tmp_path, save=own.save, load=own.load)
        box.append(run)
        run.run(1)
        assert run.manager.save(1).label == "pending"
        run.manager.poll()
        assert run.manager.newest_usable() is None
        own.gate.set()
        finish(run)
    assert [record.label for record in run.manager.records()] == ["candidate"]


def test_a_callback_that_restores_something_else_is_noticed(tmp_path: Path) -> None:
    box: list[PlainRun] = []
    own = Own(box)
    run = PlainRun(tmp_path, save=own.save, load=lambda folder: None)
    box.append(run)
    run.run(1)
    name = run.save()
    run.run(1)
    with pytest.raises(CheckpointError, match="checksum"):
        run.manager.restore(name)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"format": "zip"}, "torch or dcp"),
        ({"background": True}, "dcp"),
        ({"save": print}, "both or none"),
        ({"save": print, "load": print, "format": "dcp"}, "one of them"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Checkpoints("x", **settings)


# case: CKP-05
def test_a_checkpoint_whose_loading_ends_the_process_is_not_tried_for_ever(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    run.run(1)
    older = run.save()
    run.run(1)
    newest = run.save()
    for _ in range(MAX_TRIALS):
        target = PlainRun(tmp_path).manager.resume_target()  # and the process ends while it loads it
        assert target is not None
        assert target.checkpoint == newest
    third = PlainRun(tmp_path)
    target = third.manager.resume_target()
    assert target is not None
    assert target.checkpoint == older
    third.manager.poll()  # a step was made
    for _ in range(MAX_TRIALS + 1):
        finished = PlainRun(tmp_path)
        assert finished.manager.resume_target() == target
        finished.manager.close(0.0)  # nothing left to do: it ends in order, without a step
    for _ in range(MAX_TRIALS + 1):
        again = PlainRun(tmp_path)
        target = again.manager.resume_target()
        assert target is not None
        assert target.checkpoint == older
        again.manager.poll()
