"""Real actions through a real boundary of an attached watch; each fails when the remedy is made a no-op."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from watched_training import START, Trainer, command

import fp8watch
from fp8watch.errors import CheckpointError, Halted, RanksApart
from fp8watch.records import CheckpointRecord, CommandResult, Goodbye, Hello, LedgerUpdate, StepFrame


def results(channel, action: str) -> list[tuple[str, str]]:
    return [(r.status, r.readback) for r in channel().of(CommandResult) if r.id == f"a-{action}"]


def test_tighten_clip_is_in_force_from_the_next_step(trainer, channel):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    trainer.steps(watch, 3, clip=10.0)
    channel().replies.append(command("tighten_clip", params={"factor": 0.001}))
    trainer.steps(watch, 3, clip=10.0)
    assert results(channel, "tighten_clip")[-1] == ("applied", "ok")
    assert channel().of(StepFrame)[-1].scalars["clip_limit"] == 0.01


def test_what_was_applied_is_logged_in_words(trainer, channel, caplog):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    trainer.steps(watch, 3)
    channel().replies.append(command("bf16_layers", params={"layers": ["0"], "tensors": []}))
    trainer.steps(watch, 2)
    said = [record.message for record in caplog.records if "applied" in record.message]
    assert said == ["fp8watch: step 4: applied bf16_layers (0)"]


def test_bf16_layers_run_in_bf16_and_come_back(trainer, channel):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    trainer.steps(watch, 2)
    channel().replies.append(command("bf16_layers", params={"layers": ["0"]}))
    trainer.steps(watch, 4)
    assert results(channel, "bf16_layers") == [("applied", "pending"), ("applied", "ok")]
    assert channel().of(StepFrame)[-1].scalars["bf16_modules"] == 1.0
    channel().replies.append(command("bf16_layers", verb="revert", sequence=2))
    trainer.steps(watch, 2)
    assert channel().of(StepFrame)[-1].scalars["bf16_modules"] == 0.0


def test_observe_changes_nothing_whatever_is_sent(trainer, channel):
    twin = Trainer()
    bare = fp8watch.attach(twin.model, twin.optimizer)
    expected = twin.steps(bare, 6)
    bare.detach()
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    channel().replies.append(command("bf16_all"))
    assert trainer.steps(watch, 6) == expected
    assert results(channel, "bf16_all") == [("vetoed", "pending")]


def test_a_second_opinion_that_cannot_be_formed_is_a_veto(trainer, channel, monkeypatch):
    def explode(*_):
        raise TypeError("no such evidence")

    monkeypatch.setattr("fp8watch.training.evidence.Evidence.objection", explode)
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    trainer.steps(watch, 2)
    for sequence in range(1, 6):  # however often it fails
        channel().replies.append(command("halt", id=f"a-{sequence}", sequence=sequence))
        trainer.steps(watch, 1)
    answers = [result for result in channel().of(CommandResult) if result.id.startswith("a-")]
    assert [result.status for result in answers] == ["vetoed"] * 5
    assert "no such evidence" in answers[-1].detail


def test_halt_leaves_through_halted_only_and_keeps_the_run_from_starting(trainer, channel, tmp_path):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto", run="doomed")
    trainer.steps(watch, 2)
    channel().replies.append(command("halt", params={"reason": "test"}))
    with pytest.raises(Halted) as caught:
        trainer.steps(watch, 5)
    assert caught.value.code == 78
    assert watch.global_step == 3
    assert results(channel, "halt")[-1] == ("applied", "ok")
    assert channel().of(Goodbye)[-1].reason == "halted"
    assert not watch.is_attached
    for _ in range(2):  # a loop that catches everything is told again at each boundary
        with pytest.raises(Halted, match="test"):
            trainer.steps(watch, 1)
    with pytest.raises(Halted, match="fp8watch runs release doomed"):
        fp8watch.attach(trainer.model, trainer.optimizer, policy="auto", run="doomed")
    from fp8watch.controller import markers

    assert markers.release(tmp_path / "fp8watch", "doomed")
    fp8watch.attach(trainer.model, trainer.optimizer, policy="auto", run="doomed").detach()


class Job:
    """A run over shuffled data with a scheduler, as long as its step counter says."""

    def __init__(self, folder, policy: str = "auto") -> None:
        torch.manual_seed(11)
        self.trainer = Trainer()
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.trainer.optimizer, 0.1, total_iters=8)
        rows = [(torch.randn(32), torch.randn(32)) for _ in range(24)]
        self.loader = DataLoader(rows, batch_size=4, shuffle=True)  # type: ignore[arg-type]
        self.watch = fp8watch.attach(
            self.trainer.model, self.trainer.optimizer, lr_scheduler=self.scheduler, dataloader=self.loader,
            checkpoints=fp8watch.Checkpoints(folder, every=5), policy=policy, run="r",
        )  # fmt: skip
        self.losses: dict[tuple[int, int], float] = {}
        self.on_step = lambda step: None

    def train(self, steps: int) -> None:
        while self.watch.global_step < steps:
            for inputs, targets in self.watch.batches(self.loader):
                loss = torch.nn.functional.mse_loss(self.trainer.model(inputs), targets)
                loss.backward()
                self.trainer.optimizer.step()
                self.scheduler.step()
                self.trainer.optimizer.zero_grad()
                self.losses[self.watch.attempt, self.watch.global_step + 1] = loss.item()
                self.on_step(self.watch.global_step + 1)
                self.watch.step(loss)
                if self.watch.global_step >= steps:
                    return


def test_rollback_replays_bit_for_bit_what_was(tmp_path, channel):
    job = Job(tmp_path / "ckpt")

    def ask(step: int) -> None:
        if step == 13 and job.watch.attempt == 0:
            checkpoint = next(r for r in channel().of(CheckpointRecord) if r.step == 5)
            channel().replies.append(command("rollback", params={"checkpoint": checkpoint.checkpoint}))

    job.on_step = ask
    job.train(20)
    first = {step: loss for (attempt, step), loss in job.losses.items() if attempt == 0}
    second = {step: loss for (attempt, step), loss in job.losses.items() if attempt == 1}
    assert sorted(first) == list(range(1, 14))
    assert sorted(second) == list(range(6, 21))
    assert [second[step] for step in range(6, 14)] == [first[step] for step in range(6, 14)]
    assert results(channel, "rollback") == [("applied", "pending"), ("applied", "ok")]
    result = channel().of(CommandResult)[-1]
    assert (result.step, result.steps_replayed) == (13, 8)
    assert [(h.attempt, h.step) for h in channel().of(Hello)] == [(1, 5)]
    frames = channel().of(StepFrame)
    keys = [(frame.attempt, frame.step) for frame in frames]
    assert len(set(keys)) == len(keys)
    samples = {(frame.attempt, frame.step): frame.scalars["samples"] for frame in frames}
    assert samples[1, 6] == samples[0, 6] == 24.0
    assert samples[1, 20] == 80.0


def test_rollback_leaves_out_the_batches_it_is_told_to(tmp_path, channel):
    job = Job(tmp_path / "ckpt")

    def ask(step: int) -> None:
        if step == 9 and job.watch.attempt == 0:
            checkpoint = channel().of(CheckpointRecord)[0].checkpoint
            channel().replies.append(command("rollback", params={"checkpoint": checkpoint, "skip_batches": 2}))

    job.on_step = ask
    job.train(10)
    samples = {(f.attempt, f.step): f.scalars["samples"] for f in channel().of(StepFrame)}
    assert samples[0, 5] == 20.0
    assert samples[1, 6] == 20.0 + 2 * 4 + 4


def test_resumed_process_goes_on_bit_for_bit(tmp_path, channel):
    whole = Job(tmp_path / "whole")
    whole.train(14)
    whole.watch.detach()
    first = Job(tmp_path / "ckpt")
    first.train(12)
    first.watch.detach()
    second = Job(tmp_path / "ckpt")
    assert second.watch.resume() == 10
    assert second.watch.attempt > first.watch.attempt
    second.train(14)
    attempt = second.watch.attempt
    assert [second.losses[attempt, s] for s in range(11, 15)] == [whole.losses[0, s] for s in range(11, 15)]


def test_tainted_checkpoints_are_not_resumed_from(tmp_path, channel):
    job = Job(tmp_path / "ckpt")
    job.train(10)
    old, new = channel().of(CheckpointRecord)
    channel().replies.append(
        LedgerUpdate(run="r", checkpoint=new.checkpoint, label="tainted", reason="onset 7", start=START)
    )
    job.train(11)
    job.watch.detach()
    again = Job(tmp_path / "ckpt")
    assert again.watch.resume() == old.step == 5
    again.watch.detach()
    third = Job(tmp_path / "ckpt")
    for record in third.watch._session.context.checkpoints.records():
        third.watch._session.context.checkpoints.label(record.checkpoint, "tainted", "test")
    with pytest.raises(CheckpointError, match="tainted"):
        third.watch.resume()


def test_resume_without_any_checkpoint_starts_at_zero(tmp_path, channel, trainer, caplog):
    assert Job(tmp_path / "ckpt").watch.resume() == 0
    assert fp8watch.attach(trainer.model, trainer.optimizer).resume() == 0
    assert "given no checkpoints" in caplog.text


def going_back(channel, job: Job, at: int) -> None:
    """Have the job roll back to step 5 at this boundary."""

    def ask(step: int) -> None:
        if step == at and job.watch.attempt == 0:
            checkpoint = next(r for r in channel().of(CheckpointRecord) if r.step == 5)
            channel().replies.append(command("rollback", params={"checkpoint": checkpoint.checkpoint}))

    job.on_step = ask


def raises(error: type[BaseException]):
    def fail(*_: object, **__: object) -> None:
        raise error("odd")

    return fail


@pytest.mark.parametrize(
    "what",
    [
        "fp8watch.checkpoints.restore.optimizer_state.restore", "fp8watch.checkpoints.restore.parameter_checksum",
        "fp8watch.checkpoints.restore.rng.capture", "fp8watch.actions.rollback.FirstUpdate",
    ],
)  # fmt: skip
def test_a_state_that_is_only_partly_restored_is_neither_trained_on_nor_saved(tmp_path, channel, monkeypatch, what):
    """Whatever fails once the first parameter is overwritten, also in a way that nobody foresaw."""
    job = Job(tmp_path / "ckpt")
    going_back(channel, job, at=15)  # when a checkpoint is due
    go_back = job.on_step

    def fail_from_then_on(step: int) -> None:
        go_back(step)
        if step == 15:
            monkeypatch.setattr(what, raises(RuntimeError))

    job.on_step = fail_from_then_on
    with pytest.raises(Halted, match="rollback failed half-way") as caught:
        job.train(20)
    assert (caught.value.code, job.watch.global_step) == (78, 15)
    assert results(channel, "rollback") == [("failed", "pending")]
    assert {record.step for record in channel().of(CheckpointRecord)} == {5, 10}


def test_a_rollback_that_cannot_be_recorded_is_made_all_the_same(tmp_path, channel, monkeypatch):
    job = Job(tmp_path / "ckpt")
    going_back(channel, job, at=13)
    monkeypatch.setattr("fp8watch.checkpoints.manager.CheckpointManager.note_rollback", raises(RuntimeError))
    job.train(20)
    assert results(channel, "rollback") == [("applied", "pending"), ("applied", "ok")]


def test_a_loop_that_catches_an_interrupted_rollback_is_stopped(tmp_path, channel, monkeypatch):
    job = Job(tmp_path / "ckpt")
    going_back(channel, job, at=15)
    monkeypatch.setattr("fp8watch.checkpoints.restore.optimizer_state.restore", raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        job.train(20)
    with pytest.raises(RanksApart, match="rollback was interrupted by KeyboardInterrupt"):
        job.train(20)
    assert {record.step for record in channel().of(CheckpointRecord)} == {5, 10}
