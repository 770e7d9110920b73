from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_run import PlainRun
from torch.optim import lr_scheduler as schedulers

from fp8watch.checkpoints import manifest
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.errors import CheckpointError
from fp8watch.training.resume import resume_alone


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


# case: CKP-09
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


def saved_thrice(tmp_path: Path) -> tuple[PlainRun, list[str]]:
    """A run with checkpoints of steps 2, 4 and 6, and their names."""
    run = PlainRun(tmp_path)
    names = []
    for _ in range(3):
        run.run(2)
        names.append(run.save())
    return run, names


def test_the_next_older_good_one_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    run, names = saved_thrice(tmp_path)
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


# case: CKP-09
# case: STA-04
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


# case: CKP-02
def test_a_start_goes_on_from_the_newest_that_is_sound_whatever_its_label(tmp_path: Path) -> None:
    run, names = saved_thrice(tmp_path)
    run.manager.label(names[0], "good")
    for name in (names[0], names[2]):
        file = path_of(run, name) / "model.pt"
        file.write_bytes(file.read_bytes()[:-5])
    found = resume_alone(run.manager, 3)
    assert found is not None
    assert (found.report.checkpoint, found.report.step, found.attempt) == (names[1], 4, 3)
    assert list(found.report.refused) == [names[2]]
    file = path_of(run, names[1]) / "model.pt"
    file.write_bytes(file.read_bytes()[:-5])
    before = run.bits()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is usable"):
        resume_alone(run.manager, 3)
    assert run.bits() == before


def test_a_candidate_from_before_the_onset_takes_the_place_of_a_damaged_good_one(tmp_path: Path) -> None:
    run, names = saved_thrice(tmp_path)
    run.manager.label(names[0], "good")
    damaged = run.manager.ledger.find(names[0])
    refused = {names[0]: "damaged"}
    found = run.manager.next_best(damaged, refused, onset_step=5)
    assert found is not None
    assert found.checkpoint == names[1]
    assert run.manager.next_best(damaged, refused) is None
