"""What a checkpoint says about itself holds, whatever became of the ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plain_run import PlainRun

from fp8watch.checkpoints import ledger
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.restore import load_verified
from fp8watch.checkpoints.storage import TorchStorage
from fp8watch.errors import CheckpointError
from fp8watch.training.resume import resume_alone


def with_a_bad_one(root: Path) -> tuple[PlainRun, str, str]:
    run = PlainRun(root)
    run.run(1)
    good = run.save()
    run.run(1)
    with torch.no_grad():
        run.model.last.weight[1, 2] = float("nan")
    return run, good, run.save()


# case: SPK-21
@pytest.mark.parametrize("became", ["lost", "flipped", "forged", "kept"])
def test_weights_that_are_no_numbers_are_resumed_by_nobody(tmp_path: Path, became: str) -> None:
    run, good, bad = with_a_bad_one(tmp_path)
    assert [record.label for record in run.manager.records()] == ["candidate", "tainted"]
    path = tmp_path / ledger.NAME
    content = path.read_text()
    if became in ("lost", "flipped"):
        (tmp_path / ledger.COPY).unlink()
    if became == "lost":
        path.unlink()
    elif became == "flipped":
        path.write_text(content.replace('"version"', '"verqion"').replace("{", "[", 1))
    elif became == "forged":
        path.write_text(content.replace("tainted", "good"))
    fresh = PlainRun(tmp_path)
    found = resume_alone(fresh.manager, 0)
    assert found is not None
    assert found.report.checkpoint == good
    assert torch.isfinite(fresh.model.last.weight).all()
    label = {record.checkpoint: record.label for record in fresh.manager.records()}
    assert label == {good: "candidate", bad: "tainted"}


# case: SPK-21
@pytest.mark.parametrize("moment", ["before the folder is named", "before the ledger is written"])
def test_a_process_that_ends_between_folder_and_ledger_makes_no_candidate_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run = PlainRun(tmp_path)
    run.run(1)
    good = run.save()
    run.run(1)
    with torch.no_grad():
        run.model.first.bias[0] = float("inf")

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    if moment == "before the folder is named":
        monkeypatch.setattr("fp8watch.checkpoints.underway.os.rename", killed)
    else:
        monkeypatch.setattr(run.manager.ledger, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        run.manager.save(2)
    monkeypatch.undo()
    found = resume_alone(PlainRun(tmp_path).manager, 0)
    assert found is not None
    assert found.report.checkpoint == good


# case: SPK-21
def test_one_that_the_ledger_calls_pending_is_judged_by_its_manifest(tmp_path: Path) -> None:
    _, good, bad = with_a_bad_one(tmp_path)
    path = tmp_path / ledger.NAME
    content = json.loads(path.read_text())
    for record in content["checkpoints"]:
        record["label"] = "pending"
    path.write_text(json.dumps(content))
    label = {record.checkpoint: record.label for record in PlainRun(tmp_path).manager.records()}
    assert label == {good: "candidate", bad: "tainted"}


def test_it_is_not_even_read(tmp_path: Path) -> None:
    run, good, bad = with_a_bad_one(tmp_path)
    load_verified(tmp_path / good, run.parts, TorchStorage(), rank=0, world_size=1)
    with pytest.raises(CheckpointError, match="parameters of rank 0 are not finite"):
        load_verified(tmp_path / bad, run.parts, TorchStorage(), rank=0, world_size=1)


@pytest.mark.parametrize("became", ["lost", "flipped"])
def test_labels_outlive_the_ledger_and_are_said_to_be_lost_when_its_copy_is_gone_too(
    tmp_path: Path, became: str
) -> None:
    run = PlainRun(tmp_path)
    names = []
    for _ in range(2):
        run.run(1)
        names.append(run.save())
    run.manager.label(names[0], "good", "20 healthy steps")
    run.manager.label(names[1], "tainted", "loss spike")
    path = tmp_path / ledger.NAME

    def hurt() -> None:
        if became == "lost":
            path.unlink()
        else:
            path.write_text(path.read_text().replace('"tainted"', '"taintet"'))

    hurt()
    again: CheckpointManager = run.open()
    assert [record.label for record in again.records()] == ["good", "tainted"]
    assert bool(again.notes) == (became == "flipped")
    again.label(names[0], "good", "still")  # it is written anew
    assert "still" in path.read_text()
    hurt()
    (tmp_path / ledger.COPY).write_text("{")
    again = run.open()
    assert [record.label for record in again.records()] == ["candidate", "candidate"]
    assert any("labels are lost" in note for note in again.notes) == (became == "flipped")
