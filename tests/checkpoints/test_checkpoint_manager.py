from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_run import PlainRun
from torch.optim import lr_scheduler as schedulers

from fp8watch.checkpoints import Checkpoints, manifest
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.errors import CheckpointError


def path_of(run: PlainRun, checkpoint: str) -> Path:
    return run.manager.root / checkpoint


SCHEDULERS = {
    "none": None,
    "linear": lambda o: schedulers.LinearLR(o, start_factor=0.1, total_iters=6),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.CosineAnnealingLR(o, 20)], milestones=[4]
    ),
    "multi_step": lambda o: schedulers.MultiStepLR(o, [3, 7]),
    "one_cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=50),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1.0 / (step + 1)),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_replay_is_bit_identical(tmp_path: Path, scheduler: str) -> None:
    run = PlainRun(tmp_path, scheduler=SCHEDULERS[scheduler])
    run.run(5)
    name = run.save()
    losses, bits, lr = run.run(5), run.bits(), run.optimizer.param_groups[0]["lr"]
    report = run.manager.restore(name)
    assert (report.step, report.samples, report.data_restored) == (5, 40, True)
    assert report.refused == {}
    assert run.run(5) == losses
    assert run.bits() == bits
    assert run.optimizer.param_groups[0]["lr"] == lr


def test_a_new_process_goes_on_where_the_old_one_stopped(tmp_path: Path) -> None:
    run = PlainRun(tmp_path, scheduler=SCHEDULERS["sequential"])
    run.run(5)
    run.save()
    losses = run.run(5)
    fresh = PlainRun(tmp_path, scheduler=SCHEDULERS["sequential"])
    record = fresh.manager.newest_usable()
    assert record is not None
    assert record.step == 5
    fresh.manager.restore(record.checkpoint)
    assert fresh.run(5) == losses


def test_all_random_generators_come_back(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    random.seed(1)
    np.random.seed(1)
    name = run.save()
    drawn = [random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()]
    run.manager.restore(name)
    assert [random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()] == drawn


def test_the_scaler_comes_back(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    run = PlainRun(tmp_path, scaler=scaler)
    run.run(2)
    name = run.save()
    run.run(4)
    assert scaler.get_scale() == 256.0
    run.manager.restore(name)
    assert scaler.get_scale() == 64.0
    run.run(1)
    assert scaler.get_scale() == 128.0  # the growth tracker stood at 2


def test_the_manifest_says_what_is_inside_and_what_is_not(tmp_path: Path) -> None:
    # case: CKP-06
    run = PlainRun(tmp_path)
    run.run(2)
    found = manifest.read(path_of(run, run.save()))
    assert (found.step, found.samples, found.data_position_included, found.world_size) == (2, 16, True, 1)
    assert found.parts == ["model", "optimizer", "rng", "data"]
    assert set(found.absent) == {"scheduler", "scaler", "fp8"}
    assert found.learning_rate == [1e-2]
    run.parts.data = None
    run.run(1)
    without = manifest.read(path_of(run, run.save()))
    assert without.data_position_included is False
    assert "watch.batches" in without.absent["data"]
    with pytest.raises(CheckpointError, match="allow_without_data"):
        run.manager.restore(without.checkpoint)
    assert run.manager.restore(without.checkpoint, allow_without_data=True).data_restored is False


@pytest.mark.parametrize("file", ["model.pt", "optimizer.pt", "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty"])
def test_damage_is_refused_before_anything_is_overwritten(tmp_path: Path, file: str, damage: str) -> None:
    run = PlainRun(tmp_path)
    run.run(3)
    name = run.save()
    run.run(2)
    target = path_of(run, name) / file
    content = bytearray(target.read_bytes())
    if damage == "truncated":
        target.write_bytes(content[:-3])
    elif damage == "flipped":
        place = content.index(b'"step": 3') + 8 if file == "manifest.json" else len(content) // 2
        content[place] ^= 1
        target.write_bytes(content)
    elif damage == "empty":
        target.write_bytes(b"")
    else:
        target.unlink()
    before = run.bits()
    with pytest.raises(CheckpointError, match="no older one is intact"):
        run.manager.restore(name)
    assert run.bits() == before
    assert run.manager.records()[0].label == "tainted"
    assert run.manager.newest_usable() is None


def test_the_next_older_good_one_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    names = []
    for _ in range(3):
        run.run(2)
        names.append(run.save())
    run.manager.label(names[0], "good")
    run.manager.label(names[1], "tainted", "loss spike")
    file = path_of(run, names[2]) / "model.pt"
    file.write_bytes(file.read_bytes()[:100])
    report = run.manager.restore(names[2])
    assert report.checkpoint == names[0]
    assert report.step == 2
    assert list(report.refused) == [names[2]]
    assert "model.pt" in report.refused[names[2]]
    with pytest.raises(CheckpointError, match="tainted"):
        run.manager.restore(names[2])


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    import hashlib

    import msgspec

    run = PlainRun(tmp_path)
    name = run.save()
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(marker),))

    file = path_of(run, name) / "state.pt"
    torch.save({"rng": Evil()}, file)
    found = manifest.read(path_of(run, name))
    data = file.read_bytes()
    entry = manifest.FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    forged = msgspec.structs.replace(found, files={**found.files, "state.pt": entry})
    (path_of(run, name) / manifest.NAME).write_bytes(manifest.write(forged))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        run.manager.restore(name)
    assert not marker.exists()


@pytest.mark.parametrize("other", ["shape", "name", "groups", "scheduler"])
def test_a_checkpoint_that_does_not_fit_is_refused_with_nothing_changed(tmp_path: Path, other: str) -> None:
    run = PlainRun(tmp_path, scheduler=SCHEDULERS["linear"])
    run.run(2)
    name = run.save()
    run.run(1)
    if other == "shape":
        run.model.last = torch.nn.Linear(8, 3)
    elif other == "name":
        run.model.extra = torch.nn.Linear(1, 1)
    elif other == "groups":
        run.parts.optimizer = torch.optim.AdamW([{"params": [p]} for p in run.model.parameters()])
    else:
        run.parts.scheduler = SCHEDULERS["one_cycle"](run.optimizer)  # type: ignore[misc]
    before = run.bits()
    with pytest.raises(CheckpointError):
        run.manager.restore(name)
    assert run.bits() == before
    assert run.manager.records()[0].label == "candidate"  # it is the process that does not fit


def test_a_part_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    name = run.save()
    run.parts.scheduler = SCHEDULERS["linear"](run.optimizer)  # type: ignore[misc]
    with pytest.raises(CheckpointError, match="saved without scheduler"):
        run.manager.restore(name)


def test_a_loader_that_refuses_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PlainRun(tmp_path)
    run.run(2)
    name = run.save()
    run.run(2)
    before = run.bits()

    def refuse(state: dict[str, Any], skip_batches: int = 0) -> None:
        if state["samples"] == 16:
            raise ValueError("shard 3 is gone")
        run.data.samples = state["samples"]

    monkeypatch.setattr(run.data, "load_state_dict", refuse)
    with pytest.raises(CheckpointError, match="shard 3") as caught:
        run.manager.restore(name)
    assert not isinstance(caught.value, PartlyRestored)
    assert run.bits() == before


def test_what_cannot_be_stored_is_named_when_it_is_saved(tmp_path: Path) -> None:
    class Factor:
        def __init__(self) -> None:
            self.handle = object()

        def __call__(self, step: int) -> float:
            return 1.0

    run = PlainRun(tmp_path, scheduler=lambda o: schedulers.LambdaLR(o, Factor()))
    with pytest.raises(CheckpointError, match=r"scheduler\.lr_lambdas\[0\]\.handle"):
        run.save()
    assert run.manager.records() == []
    run.step()


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
    assert sorted(entry.name for entry in run.manager.root.iterdir()) == ["ledger.json", name]
    run.step()
    assert run.manager.restore(name).step == 2


def test_a_directory_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used"):
        PlainRun(tmp_path / "file" / "below")


@pytest.mark.parametrize("moment", ["torch.save", "os.fsync", "write_synced", "os.rename"])
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
        patch.setattr(f"fp8watch.checkpoints.manager.{moment}", killed)
        with pytest.raises(KeyboardInterrupt):
            run.manager.save(2)
    assert any(entry.name.startswith(".unfinished") for entry in tmp_path.iterdir())
    again = run.open()
    assert [record.checkpoint for record in again.records()] == [name]
    assert not any(entry.name.startswith(".unfinished") for entry in tmp_path.iterdir())


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
    names = []
    for number in range(6):
        run.step()
        names.append(run.save())
        if number == 1:
            run.manager.label(names[1], "good")
    kept = [record.checkpoint for record in run.manager.records()]
    assert kept == [names[1], names[5]]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == sorted(kept)
    assert run.manager.restore(names[1]).step == 2


def test_settings_are_checked(tmp_path: Path) -> None:
    for bad in ({"every": 0}, {"keep": 0}, {"keep": 1.5}, {"healthy_steps": -1}, {"every": True}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Checkpoints(tmp_path, **bad)  # type: ignore[arg-type]
    assert Checkpoints("somewhere").path == Path("somewhere")


def test_the_package_loads_no_torch() -> None:
    code = "import sys, fp8watch.checkpoints, fp8watch.checkpoints.targets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
