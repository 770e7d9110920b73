"""Two models in one process, told to save into one directory: each would write over the other's labels."""

from __future__ import annotations

import json

import pytest
from watched_training import Trainer

import fp8watch
from fp8watch.errors import CheckpointError


def attach(trainer, folder, run):
    saves = fp8watch.Checkpoints(folder, every=2)
    return fp8watch.attach(trainer.model, trainer.optimizer, run=run, policy="auto", checkpoints=saves)


def labels(folder):
    found = json.loads((folder / "ledger.json").read_text())["checkpoints"]
    return {(record["run"], record["checkpoint"], record["label"]) for record in found}


def test_the_second_saves_nothing_resumes_nothing_and_says_why(tmp_path, channel, caplog):
    folder = tmp_path / "ckpt"
    generator, critic = Trainer(), Trainer()
    first = attach(generator, folder, "generator")
    second = attach(critic, folder, "critic")
    assert "no checkpoints will be saved: run generator of this process saves into" in caplog.text
    assert second.capabilities["rollback"]
    generator.steps(first, 2)
    checkpoints = first._session.context.checkpoints
    checkpoints.label("step-00000002-attempt-0", "tainted", "loss spike")
    critic.steps(second, 4)
    assert labels(folder) == {("generator", "step-00000002-attempt-0", "tainted")}
    with pytest.raises(CheckpointError, match="generator"):
        second.resume()
    assert second.global_step == 4
    second.detach()
    generator.steps(first, 2)
    assert ("generator", "step-00000004-attempt-0", "candidate") in labels(folder)


def test_after_detach_the_folder_is_free(tmp_path, channel, trainer):
    folder = tmp_path / "ckpt"
    first = attach(trainer, folder, "a")
    trainer.steps(first, 2)
    first.detach()
    second = attach(trainer, folder, "a")
    assert second.resume() == 2


def test_a_folder_that_cannot_be_used_is_not_taken_for_an_empty_one(tmp_path, channel, trainer):
    """Training from the beginning unasked would be worse than not to train."""
    (tmp_path / "file").write_text("")
    watch = attach(trainer, tmp_path / "file" / "ckpt", "a")
    trainer.steps(watch, 2)
    with pytest.raises(CheckpointError, match="cannot be used"):
        watch.resume()
