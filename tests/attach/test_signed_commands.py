"""With a command key in its environment, a training process does what the controller signed, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from watched_training import START, command

import fp8watch
from fp8watch.errors import BadInput
from fp8watch.records import CommandResult, LedgerUpdate, StepFrame
from fp8watch.security import KeyRing, Signer

KEY = "k" * 40


@pytest.fixture
def signer(monkeypatch: pytest.MonkeyPatch) -> Signer:
    monkeypatch.setenv("FP8WATCH_COMMAND_KEY", KEY)
    return Signer(KeyRing("command", (KEY.encode(),)))


def limits(channel) -> list[float]:
    return [frame.scalars["clip_limit"] for frame in channel().of(StepFrame)]


def test_what_the_controller_signed_is_done(trainer, channel, signer):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    channel().replies.append(signer.command(command("tighten_clip", params={"factor": 0.001})))
    trainer.steps(watch, 4, clip=10.0)
    assert limits(channel)[-1] == 0.01


def test_a_forged_command_is_neither_done_nor_in_the_way_of_the_real_one(trainer, channel, signer):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    forged = command("tighten_clip", params={"factor": 0.5}, term=10**6, sequence=10**6)
    wrong_key = Signer(KeyRing("command", (b"x" * 40,))).command(forged)
    genuine = signer.command(command("tighten_clip", params={"factor": 0.001}))
    altered = signer.command(command("halt", verb="revert", id="other"))
    channel().replies += [
        forged,
        wrong_key,
        type(altered)(**{f: getattr(altered, f) for f in altered.__struct_fields__} | {"verb": "apply"}),
    ]
    trainer.steps(watch, 4, clip=10.0)
    assert limits(channel) == [10.0] * 4
    assert channel().of(CommandResult) == []
    assert channel().dropped == {"forged": 3}
    channel().replies.append(genuine)
    trainer.steps(watch, 4, clip=10.0)
    assert limits(channel)[-1] == 0.01


def test_a_signed_command_is_not_done_twice(trainer, channel, signer):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    genuine = signer.command(command("tighten_clip", params={"factor": 0.1}))
    undone = signer.command(command("tighten_clip", verb="revert", sequence=2))
    channel().replies.append(genuine)
    trainer.steps(watch, 3, clip=10.0)
    channel().replies.append(undone)
    trainer.steps(watch, 3, clip=10.0)
    assert limits(channel)[-1] == 10.0
    channel().replies.append(genuine)
    trainer.steps(watch, 3, clip=10.0)
    assert limits(channel)[-1] == 10.0


@pytest.mark.parametrize(
    ("start", "status", "detail"),
    [
        ("the last start", "expired", "decided for another start of this run"),
        ("", "vetoed", "it does not say for which start of the run: upgrade controller and agent to this version"),
    ],
)
def test_what_was_signed_for_another_start_is_refused_and_answered(trainer, channel, signer, start, status, detail):
    """A run of the same name that is new here: attempt, term and last step are all as they would be for this one."""
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    old = signer.command(command("tighten_clip", params={"factor": 0.001}, start=start))
    channel().replies.append(old)
    trainer.steps(watch, 4, clip=10.0)
    assert limits(channel) == [10.0] * 4
    (answer,) = channel().of(CommandResult)
    assert (answer.id, answer.status, answer.detail, answer.start) == (old.id, status, detail, start)
    # Nor is it in the way of one for this start, under the same id and number.
    channel().replies += [old, signer.command(command("tighten_clip", params={"factor": 0.1}))]
    trainer.steps(watch, 4, clip=10.0)
    assert limits(channel)[-1] == 1.0
    channel().replies.append(old)
    trainer.steps(watch, 2, clip=10.0)
    last = channel().of(CommandResult)[-1]
    assert (last.status, last.start) == (status, start), "not the answer to the one that was done"


def test_a_checkpoint_is_not_relabelled_by_a_stranger(trainer, channel, signer, tmp_path):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, checkpoints=fp8watch.Checkpoints(tmp_path / "c", every=2))
    trainer.steps(watch, 2)
    (saved,) = watch._session.checkpoint_records()
    update = LedgerUpdate(run=saved.run, checkpoint=saved.checkpoint, label="tainted", start=START)
    of_before = [msgspec.structs.replace(update, start=start) for start in ("the last start", "")]
    channel().replies += [update, *map(signer.ledger, of_before)]
    trainer.steps(watch, 1)
    assert watch._session.checkpoint_records()[0].label != "tainted"
    channel().replies.append(signer.ledger(update))
    trainer.steps(watch, 1)
    assert watch._session.checkpoint_records()[0].label == "tainted"


def test_labels_that_come_again_are_neither_taken_nor_called_forged(trainer, channel, signer, tmp_path, caplog):
    """An agent that was started again reads all that was ever said, from the beginning."""
    watch = fp8watch.attach(trainer.model, trainer.optimizer, checkpoints=fp8watch.Checkpoints(tmp_path / "c", every=2))
    trainer.steps(watch, 2)
    (saved,) = watch._session.checkpoint_records()
    labels = [
        signer.ledger(LedgerUpdate(run="r", checkpoint=saved.checkpoint, label=label, start=START, issued_ns=number))
        for number, label in enumerate(("good", "candidate"), 1)
    ]
    channel().replies += [*labels, *labels]
    trainer.steps(watch, 1)
    channel().replies.append(labels[0])
    trainer.steps(watch, 1)
    assert watch._session.checkpoint_records()[0].label == "candidate"
    assert channel().dropped == {}
    assert "signature" not in caplog.text


def test_a_bad_key_is_found_before_anything_starts(trainer, channel, monkeypatch):
    monkeypatch.setenv("FP8WATCH_COMMAND_KEY", "short")
    with pytest.raises(BadInput, match="at least 32"):
        fp8watch.attach(trainer.model, trainer.optimizer)
