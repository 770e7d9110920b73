"""fp8watch's own failures stay its own: training goes on with identical numbers, and the failure is said once."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from watched_training import START, RecordingChannel, Trainer, command

import fp8watch
from fp8watch.actions.lr_rules import Hold
from fp8watch.capture.emulated import EmulatedSource
from fp8watch.checkpoints import Checkpoints
from fp8watch.records import CommandResult, LedgerUpdate, StepFrame
from fp8watch.training.guard import FAILURES_TO_DISABLE, Guard


def expected_losses(steps: int) -> list[float]:
    twin = Trainer()
    bare = fp8watch.attach(twin.model, twin.optimizer)
    losses = twin.steps(bare, steps)
    bare.detach()
    return losses


@pytest.mark.parametrize(
    "part",
    [
        "fp8watch.capture.emulated.EmulatedSource.read",
        "fp8watch.capture.emulated.EmulatedSource.begin",
        "fp8watch.capture.emulated.EmulatedSource.columns",
        "fp8watch.capture.emulated.EmulatedSource.not_observable",
        "fp8watch.capture.update_size.UpdateSize.before",
        "fp8watch.capture.update_size.UpdateSize.after",
        "fp8watch.capture.ring.Ring.push",
        "fp8watch.capture.ring.Ring.poll",
        "fp8watch.capture.frames.build_frame",
        "fp8watch.actions.clip_control.ClipControl.take",
        "fp8watch.actions.clip_control.ClipControl.before_step",
        "fp8watch.actions.skip_guard.SkipGuard.before_step",
        "fp8watch.actions.lr_control.LrControl.enter",
        "fp8watch.actions.lr_control.LrControl.leave",
        "fp8watch.training.boundary.Boundary.run",
        "fp8watch.training.session.Session.maybe_save",
        "watched_training.RecordingChannel.send",
        "watched_training.RecordingChannel.take",
        "watched_training.RecordingChannel.notes",
    ],
)
def test_no_exception_of_ours_reaches_training(trainer, channel, monkeypatch, caplog, tmp_path, part):
    expected = expected_losses(8)
    checkpoints = Checkpoints(tmp_path, every=4) if part.endswith("maybe_save") else None
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto", checkpoints=checkpoints)
    called = []

    def fail(*args, **kwargs):
        called.append(1)
        raise RuntimeError("unknown FP8 state")

    monkeypatch.setattr(part, fail)
    if part.endswith("Boundary.run"):
        channel().replies.extend(command("checkpoint_now", id=str(i), sequence=i) for i in range(3))
    if part.endswith("ClipControl.before_step"):  # without a limit of ours it is not called
        watch._session.context.clip.set_limit(1e9)
    if part.endswith("LrControl.enter"):  # nor this without a rule
        watch._session.context.lr.add("test", Hold(begin=0, steps=None))
    assert trainer.steps(watch, 8) == expected
    assert watch.global_step == 8
    assert called
    assert len(called) <= 2 * FAILURES_TO_DISABLE
    assert sum(watch.failures.values()) >= 1
    parts = 2 if part.endswith("EmulatedSource.begin") else 1  # it is tried without samples too
    assert caplog.text.count("failed; training is not affected") == parts
    watch.detach()
    assert trainer.steps(watch, 1)


def test_one_broken_part_leaves_the_others_observed(trainer, channel, monkeypatch):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    monkeypatch.setattr(
        "fp8watch.capture.emulated.EmulatedSource.read", lambda self: (_ for _ in ()).throw(TypeError("quantizer"))
    )
    trainer.steps(watch, 3)
    frames = channel().of(StepFrame)
    assert [frame.step for frame in frames] == [1, 2, 3]
    assert not frames[-1].columns
    assert {"loss", "grad_norm", "update_rms"} <= frames[-1].scalars.keys()


def test_guard_forgives_single_failures_and_ends_a_part_that_keeps_failing(caplog):
    guard = Guard(limit=3)

    def odd(number: int) -> int:
        if number % 2:
            raise ValueError("odd")
        return number

    assert [guard.call("part", odd, n) for n in range(6)] == [0, None, 2, None, 4, None]
    assert guard.disabled == {}
    assert [guard.call("part", odd, 1) for _ in range(5)] == [None] * 5
    assert guard.failures["part"] == 5  # three before, then two more in a row make three
    assert list(guard.disabled) == ["part"]
    assert guard.call("part", odd, 2) is None
    assert guard.call("other", odd, 2) == 2
    assert caplog.text.count("off for the rest of this run") == 1


def test_guard_lets_pass_what_is_no_failure_of_ours():
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard().call("part", stop)


def test_unwritable_directory_is_one_warning_and_training_goes_on(trainer, monkeypatch, tmp_path, caplog):
    """With the real transport: nothing can be written, so nothing is recorded and nothing may act."""
    expected = expected_losses(5)
    caplog.clear()
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FP8WATCH_DIR", str(tmp_path / "file" / "fp8watch"))
    monkeypatch.setenv("FP8WATCH_START_SECONDS", "60")  # one that is waited for in vain would be warned of, too
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    assert trainer.steps(watch, 5) == expected
    assert watch._session.uplink.await_agent(20.0)
    time.sleep(0.5)
    watch._take_replies()  # the process has told where the store lies now
    assert watch.failures == {}
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "journal" in warning.getMessage()
    assert all("cannot be written" in reason for reason in watch.capabilities.values())


def test_disk_full_at_a_checkpoint_is_said_and_training_goes_on(trainer, channel, tmp_path, monkeypatch, caplog):
    watch = fp8watch.attach(
        trainer.model, trainer.optimizer, checkpoints=fp8watch.Checkpoints(tmp_path / "ckpt", every=2)
    )  # fmt: skip

    def full(*args, **kwargs):
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    trainer.steps(watch, 8)
    assert watch.global_step == 8
    assert "could not be saved" in caplog.text
    assert watch.failures["checkpoints"] == 4


def test_verdicts_on_checkpoints_that_rotation_removed_do_not_switch_labels_off(
    trainer: Trainer, channel: Callable[[], RecordingChannel], tmp_path: Path
) -> None:
    watch = fp8watch.attach(
        trainer.model, trainer.optimizer, checkpoints=fp8watch.Checkpoints(tmp_path / "ckpt", every=1, keep=2)
    )
    link = channel()
    for _ in range(2 * FAILURES_TO_DISABLE):
        link.replies.append(
            LedgerUpdate(run=watch.run, checkpoint="step-00000000-attempt-0", label="good", start=START)
        )
    trainer.steps(watch, 1)
    link.replies.append(
        LedgerUpdate(run=watch.run, checkpoint="step-00000001-attempt-0", label="tainted", reason="onset", start=START)
    )
    trainer.steps(watch, 1)
    assert watch.failures == {}
    labels = [record.label for record in watch._session.checkpoint_records()]
    assert labels == ["tainted", "candidate"]


def test_what_cannot_be_observed_any_more_is_said_whenever_it_begins(trainer, channel, monkeypatch):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    trainer.steps(watch, 11)

    def fail(*args):
        raise RuntimeError("no longer readable")

    monkeypatch.setattr("fp8watch.capture.emulated.EmulatedSource.not_observable", fail)
    trainer.steps(watch, 30)
    assert any(text.startswith("layout: off") for text in watch.not_observable)
    assert watch.failures["layout"] == FAILURES_TO_DISABLE


def test_a_loss_is_let_go_even_when_its_step_cannot_be_sent(trainer, channel, monkeypatch):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)

    def fail(*args):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("fp8watch.capture.ring.Ring.push", fail)
    for _ in range(8):
        hidden = trainer.model(trainer.inputs).exp()
        kept = weakref.ref(hidden)
        loss = hidden.mean()
        hidden.sum().backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        watch.step(loss)
        del hidden, loss
        assert kept() is None
    assert "ring" in watch._guard.disabled


def observed_steps(channel) -> list[bool]:
    return [bool(frame.columns) for frame in channel().of(StepFrame)]


@pytest.mark.parametrize(
    "part", ["capture.governor.Governor.next_due", "capture.closer.CloserLook._look", "capture.closer.CloserLook._arm"]
)
def test_a_closer_look_that_cannot_begin_costs_no_step_its_numbers(trainer, channel, monkeypatch, part):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    trainer.steps(watch, 2)

    def fail(*_, **__):
        raise RuntimeError("odd")

    monkeypatch.setattr(f"fp8watch.{part}", fail)
    for _ in range(12):
        watch.look_closer(["0"])
        trainer.steps(watch, 1)
    watch.detach()
    assert observed_steps(channel) == [True] * 14
    assert watch.failures["emulation begin"] == FAILURES_TO_DISABLE
    assert any(text.startswith("emulation begin: off") for text in watch.not_observable)


@pytest.mark.parametrize(("calls", "lost"), [(1, 0), (4, 2), (5, 2), (10**9, 11)])
def test_a_source_that_cannot_begin_for_a_while_is_read_again_or_said_to_be_off(
    trainer, channel, monkeypatch, calls, lost
):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    trainer.steps(watch, 2)
    own, failed = EmulatedSource.begin, []

    def begin(self, *, with_statistics):
        if len(failed) < calls:
            failed.append(1)
            raise RuntimeError("odd")
        own(self, with_statistics=with_statistics)

    monkeypatch.setattr(EmulatedSource, "begin", begin)
    trainer.steps(watch, 12)
    watch.detach()
    assert observed_steps(channel) == [True] * 3 + [False] * lost + [True] * (11 - lost)
    off = [text.partition(":")[0] for text in watch.not_observable if ": off" in text]
    assert off == {5: ["emulation begin"], 10**9: ["emulation begin", "emulation begin without samples"]}.get(calls, [])


def test_commands_are_answered_when_the_boundary_is_off(trainer, channel, monkeypatch):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")

    def fail(*_):
        raise RuntimeError("odd")

    monkeypatch.setattr("fp8watch.training.boundary.Boundary.run", fail)
    for number in range(1, 6):
        channel().replies.append(command("hold_lr", id=f"a-{number}", sequence=number, params={"factor": 0.5}))
        trainer.steps(watch, 1)
    answers = [result for result in channel().of(CommandResult) if result.id.startswith("a-")]
    assert [(answer.id, answer.status, answer.step) for answer in answers] == [
        ("a-1", "unavailable", 3), ("a-2", "unavailable", 3), ("a-3", "unavailable", 3), ("a-4", "unavailable", 4),
        ("a-5", "unavailable", 5),
    ]  # fmt: skip
    assert {answer.detail for answer in answers} == {"commands are not carried out any more (RuntimeError: odd)"}
    assert set(watch.capabilities.values()) == {"commands are not carried out any more (RuntimeError: odd)"}
