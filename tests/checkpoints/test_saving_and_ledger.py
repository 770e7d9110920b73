from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_run import PlainRun

from fp8watch.checkpoints import Checkpoints, ledger, owner
from fp8watch.checkpoints.place import Place
from fp8watch.checkpoints.space import expected_bytes
from fp8watch.errors import CheckpointError


def path_of(run: PlainRun, checkpoint: str) -> Path:
    return run.manager.root / checkpoint


# Saving


def test_cadence_and_one_save_a_step(tmp_path: Path) -> None:
    run = PlainRun(tmp_path, every=2)
    for _ in range(5):
        run.step()
        run.manager.maybe_save(run.step_number)
    assert [record.step for record in run.manager.records()] == [2, 4]
    first = run.manager.save(5)
    assert run.manager.save(5) == first
    run.attempt = 1
    assert run.manager.save(5).checkpoint != first.checkpoint


# case: CKP-14
def test_a_full_disk_is_reported_and_leaves_the_old_ones(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    run.run(2)
    name = run.save()
    run.run(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # every write beyond it fails, as on a full disk
    try:
        with pytest.raises(CheckpointError, match="could not be saved"):
            run.manager.save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.checkpoint for record in run.manager.records()] == [name]
    assert sorted(entry.name for entry in run.manager.root.iterdir()) == [
        owner.NAME, ledger.COPY, "ledger.json", name,
    ]  # fmt: skip
    run.step()
    assert run.manager.restore(name).step == 2


# case: CKP-14
def test_a_disk_that_will_be_too_small_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PlainRun(tmp_path, keep=3)
    assert run.manager.notes == []
    run.run(2)
    weights = sum(p.numel() * p.element_size() for p in run.model.parameters())
    one = expected_bytes(run.model, run.optimizer, Place())
    assert 3 * weights < one < 3.5 * weights  # two moments; step counters and buffers
    fresh = torch.optim.AdamW(run.model.parameters())
    assert expected_bytes(run.model, fresh, Place()) == pytest.approx(one, rel=0.1)
    assert expected_bytes(run.model, fresh, Place(world_size=4, layout="shards")) > 11 * weights
    name = run.save()
    saved = sum(file.stat().st_size for file in path_of(run, name).glob("*.pt"))
    assert saved > one
    for free, is_said in ((4 * one, False), (4 * one - 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert bool(run.manager.notes) == is_said
    assert "keep=3" in run.manager.notes[0]


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may write to, as a user whom permissions bind (root's do not)."""
    PlainRun(tmp_path).save()  # imports what is imported late from where that user may not be able to read
    folder = Path(tempfile.mkdtemp(prefix="fp8w"))
    is_root = os.geteuid() == 0
    folder.chmod(0o777)
    if is_root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777)
        shutil.rmtree(folder)


def test_a_folder_that_has_become_read_only_costs_the_checkpoint_and_not_the_run(as_nobody: Path) -> None:
    run = PlainRun(as_nobody / "ckpt")
    run.run(1)
    name = run.save()
    run.manager.root.chmod(0o555)
    run.step()
    with pytest.raises(CheckpointError, match="Permission denied"):
        run.save()
    assert [record.checkpoint for record in run.manager.records()] == [name]
    run.step()
    assert run.manager.restore(name).step == 1
    run.manager.root.chmod(0o777)
    run.step()
    assert run.manager.restore(run.save()).step == 4


def test_a_directory_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used"):
        PlainRun(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    "moment", ["storage.torch.save", "storage.os.fsync", "underway.write_synced", "underway.os.rename"]
)
def test_an_interrupted_save_is_never_offered_and_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run = PlainRun(tmp_path)
    run.run(1)
    name = run.save()
    run.run(1)

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"fp8watch.checkpoints.{moment}", killed)
        with pytest.raises(KeyboardInterrupt):
            run.manager.save(2)
    assert any(entry.name.startswith(".unfinished") for entry in tmp_path.iterdir())
    again = run.open()
    assert [record.checkpoint for record in again.records()] == [name]
    assert not any(entry.name.startswith(".unfinished") for entry in tmp_path.iterdir())


# case: CKP-01
def test_killed_at_any_moment_the_newest_complete_one_is_there(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        from pathlib import Path
        from plain_run import PlainRun
        run = PlainRun(Path(sys.argv[1]), keep=3)
        while True:
            run.step()
            run.save()
            print(run.step_number, flush=True)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for _ in range(5):
        reached = int(process.stdout.readline())
    time.sleep(random.random() / 50)
    process.kill()
    process.wait()
    process.stdout.close()
    run = PlainRun(tmp_path, keep=3)
    record = run.manager.newest_usable()
    assert record is not None
    assert record.step >= reached
    assert run.manager.restore(record.checkpoint).refused == {}


# The ledger


def test_labels_survive_and_tainted_is_final(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    names = []
    for _ in range(3):
        run.step()
        names.append(run.save())
    run.manager.label(names[0], "good", "20 healthy steps")
    run.manager.label(names[2], "tainted", "after the onset at step 2")
    run.manager.label(names[2], "good")
    again = run.open()
    assert [record.label for record in again.records()] == ["good", "candidate", "tainted"]
    assert again.records()[2].reason == "after the onset at step 2"
    newest = again.newest_usable()
    assert newest is not None
    assert newest.checkpoint == names[1]
    with pytest.raises(CheckpointError, match="after the onset"):
        again.restore(names[2])
    with pytest.raises(CheckpointError, match="known: "):
        again.label("step-1", "good")


def test_a_lost_ledger_and_lost_folders(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    names = []
    for _ in range(3):
        run.step()
        names.append(run.save())
    (tmp_path / "ledger.json").write_text('{"version": 1, "checkpo')
    (tmp_path / ledger.COPY).unlink()
    (tmp_path / names[1] / "manifest.json").unlink()
    again = run.open()
    assert [record.checkpoint for record in again.records()] == [names[0], names[2]]
    assert any("labels are lost" in note for note in again.notes)
    assert any(names[1] in note for note in again.notes)


def test_the_ledger_is_readable_json_outside_the_folders(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    run.step()
    name = run.save()
    before = {file.name: file.read_bytes() for file in path_of(run, name).iterdir()}
    run.manager.label(name, "good", "healthy")
    content = json.loads((tmp_path / "ledger.json").read_text())
    assert content["checkpoints"][0]["label"] == "good"
    assert {file.name: file.read_bytes() for file in path_of(run, name).iterdir()} == before


def test_rotation_keeps_the_last_good_one_and_the_newest(tmp_path: Path) -> None:
    run = PlainRun(tmp_path, keep=2)
    names, told = [], []
    run.manager.on_change = lambda record: told.append((record.checkpoint, bool(record.path)))
    for number in range(6):
        run.step()
        names.append(run.save())
        if number == 1:
            run.manager.label(names[1], "good")
    kept = [record.checkpoint for record in run.manager.records()]
    assert kept == [names[1], names[5]]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == sorted(kept)
    assert run.manager.restore(names[1]).step == 2
    # Whoever chooses a target must know what is gone.
    assert [name for name, exists in told if not exists] == [names[0], *names[2:5]]


def test_settings_are_checked(tmp_path: Path) -> None:
    for bad in ({"every": 0}, {"keep": 0}, {"keep": 1.5}, {"healthy_steps": -1}, {"every": True}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Checkpoints(tmp_path, **bad)  # type: ignore[arg-type]
    assert Checkpoints("somewhere").path == Path("somewhere")


def test_the_package_loads_no_torch() -> None:
    code = "import sys, fp8watch.checkpoints, fp8watch.checkpoints.targets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
