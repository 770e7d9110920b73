from __future__ import annotations

import copy
import io
import logging
import threading

import pytest
import torch

import fp8watch
from fp8watch.emulation import taps
from fp8watch.errors import BadInput
from fp8watch.records import Goodbye, Hello, Layout, StepFrame
from fp8watch.training.agreement import ObserveOnly
from fp8watch.training.agreement.join import Joined


def hooks(model: torch.nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]


def test_second_attach_with_the_same_arguments_is_the_same_watch(trainer, channel, caplog):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    for _ in range(2):
        assert fp8watch.attach(trainer.model, trainer.optimizer, policy="auto") is watch
    assert [record.message for record in caplog.records].count(
        "fp8watch: attach was called again with the same arguments: the same watch is returned"
    ) == 1
    trainer.steps(watch, 3)
    assert [frame.step for frame in channel().of(StepFrame)] == [1, 2, 3]


def test_second_attach_with_other_arguments_is_refused(trainer, channel):
    fp8watch.attach(trainer.model, trainer.optimizer)
    with pytest.raises(ValueError, match="policy"):
        fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    other = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer"):
        fp8watch.attach(trainer.model, other)


# case: HOK-11
def test_detach_leaves_nothing_behind_and_attach_works_afresh(trainer, channel):
    model, optimizer = trainer.model, trainer.optimizer
    before = hooks(model), set(vars(optimizer)), len(taps._taps)
    watch = fp8watch.attach(model, optimizer)
    assert (hooks(model), set(vars(optimizer)), len(taps._taps)) != before
    trainer.steps(watch, 2)
    watch.detach()
    assert (hooks(model), set(vars(optimizer)) - {"_opt_called"}, len(taps._taps)) == before
    assert channel().of(Goodbye)[-1].step == 2
    assert channel().is_closed
    trainer.steps(watch, 2)  # a detached watch is a harmless bystander
    assert watch.global_step == 2
    again = fp8watch.attach(model, optimizer, policy="auto")
    assert again is not watch
    trainer.steps(again, 1)
    assert [frame.step for frame in channel().of(StepFrame)] == [1]


def test_context_manager_detaches_after_an_error(trainer, channel):
    with pytest.raises(KeyError), fp8watch.attach(trainer.model, trainer.optimizer) as watch:
        raise KeyError("loop")
    assert not watch.is_attached
    assert channel().of(Goodbye)[-1].reason == "error: KeyError"


@pytest.mark.parametrize("bad", ["version: 1\nmode: loud\nrule: []\n", "no/such/policy.yaml"])
def test_bad_policy_starts_nothing(trainer, bad):
    threads = set(threading.enumerate())
    with pytest.raises(BadInput) as caught:
        fp8watch.attach(trainer.model, trainer.optimizer, policy=bad)
    assert all(":" in problem for problem in caught.value.problems)
    assert set(threading.enumerate()) <= threads
    assert "step" not in vars(trainer.optimizer)
    assert not taps._taps


def test_bad_setting_is_bad_input(trainer, monkeypatch):
    monkeypatch.setenv("FP8WATCH_QUEUE_FRAMES", "many")
    with pytest.raises(BadInput, match="FP8WATCH_QUEUE_FRAMES"):
        fp8watch.attach(trainer.model, trainer.optimizer)


def test_wrong_types_are_named(trainer):
    with pytest.raises(TypeError, match="model"):
        fp8watch.attach(trainer.optimizer, trainer.model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Checkpoints\(\"ckpt\", every=200\) is wanted, got str 'ckpt'"):
        fp8watch.attach(trainer.model, trainer.optimizer, checkpoints="ckpt")  # type: ignore[arg-type]


def test_model_without_fp8_is_watched_by_loss_and_gradients(channel, caplog, monkeypatch):
    from watched_training import Trainer

    monkeypatch.setenv("FP8WATCH_REPORT", "1")
    caplog.set_level(logging.INFO, "fp8watch")
    trainer = Trainer(fp8=False)
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    assert "no FP8 layer in this model: watching loss and gradients only" in caplog.text
    trainer.steps(watch, 2)
    frame = channel().of(StepFrame)[-1]
    assert not frame.columns
    assert {"loss", "grad_norm", "learning_rate", "update_rms", "step_seconds"} <= frame.scalars.keys()
    assert channel().preamble[1].expected_modules == 0


def test_report_names_unavailable_actions_with_the_reason(trainer, channel, caplog, monkeypatch):
    monkeypatch.setenv("FP8WATCH_REPORT", "1")
    caplog.set_level(logging.INFO, "fp8watch")
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    for action in ("rollback", "lengthen_warmup", "adjust_loss_scale"):
        assert watch.capabilities[action]
        assert watch.capabilities[action] in caplog.text
    assert watch.capabilities["halt"] == ""


def test_first_messages_describe_run_and_tensors(trainer, channel):
    fp8watch.attach(trainer.model, trainer.optimizer, run="my run/1", policy="auto")
    hello, layout = channel().preamble
    assert isinstance(hello, Hello)
    assert isinstance(layout, Layout)
    assert hello.run == layout.run == "my-run-1"
    assert hello.policy is not None
    assert (hello.attempt, hello.step, hello.world_size) == (0, 0, 1)
    assert [column.name for column in layout.columns][:3] == ["0:input", "0:weight", "0:grad_output"]
    assert (layout.observed_modules, layout.expected_modules) == (2, 2)


def test_a_restarted_run_is_a_new_attempt(trainer, channel):
    for attempt in range(3):
        watch = fp8watch.attach(trainer.model, trainer.optimizer, run="again")
        assert watch.attempt == attempt
        watch.detach()


def test_model_can_be_copied_and_pickled_while_attached(trainer, channel):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    twin = copy.deepcopy(trainer.model)
    torch.save(trainer.model, io.BytesIO())
    copy.deepcopy(trainer.optimizer)
    twin(trainer.inputs).sum().backward()
    trainer.steps(watch, 1)
    frame = channel().of(StepFrame)[-1]
    assert frame.updates_forward == 1  # the copy's forward is not ours


def test_several_ranks_observe_and_do_not_act(trainer, channel, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto", run="r")
    (reason,) = set(watch.capabilities.values())
    assert reason == "several ranks: torch.distributed is not initialised, so they cannot agree"
    trainer.steps(watch, 1)
    assert channel().of(StepFrame)[-1].rank == 2
    assert channel().preamble[0].world_size == 4


def test_what_disarms_a_run_is_said_at_attach(trainer, channel, monkeypatch, capfd):
    monkeypatch.setenv("FP8WATCH_REPORT", "1")
    monkeypatch.setenv("FP8WATCH_DISARM", "1")
    fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    assert "nothing acts: disarmed by FP8WATCH_DISARM" in capfd.readouterr().err


def test_what_ranks_found_of_each_other_is_said_once_at_attach(trainer, channel, monkeypatch, caplog):
    said = "the ranks cannot act together: they run different versions of fp8watch"
    joined = Joined(agreement=ObserveOnly("several ranks: apart"), attempt=0, remark=said)
    monkeypatch.setattr("fp8watch.training.assemble.join", lambda *_, **__: joined)
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    trainer.steps(watch, 3)
    assert caplog.text.count(said) == 1
    assert set(watch.capabilities.values()) == {"several ranks: apart"}
    watch.detach()
    assert len(channel().of(StepFrame)) == 3, "it is observed all the same"
