from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fp8watch
from fp8watch.records import StepFrame


def watched(trainer, channel):
    return fp8watch.attach(trainer.model, trainer.optimizer), channel


@pytest.mark.parametrize(
    "loss",
    [
        torch.tensor(2.5),
        torch.tensor([2.5]),
        torch.tensor([[2.5]], dtype=torch.float64),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor(2.5, requires_grad=True),
        torch.tensor(2.5, requires_grad=True).detach(),
        2.5,
        np.float32(2.5),
        np.array(2.5),
        np.array([2.5]),
    ],
)
def test_every_form_of_one_number_is_a_loss(trainer, channel, loss, caplog):
    watch, _ = watched(trainer, channel)
    watch.step(loss)
    assert channel().of(StepFrame)[-1].scalars["loss"] == 2.5
    assert "loss not observed" not in caplog.text


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (torch.ones(3), r"shape (3,)"),
        (torch.ones(0), "shape (0,)"),
        (torch.tensor(1j), "complex64"),
        (torch.ones((), device="meta"), "meta"),
        ("2.5", "type str"),
        ({"loss": 2.5}, "type dict"),
        (np.ones(2), "shape (2,)"),
    ],
)
def test_anything_else_is_described_once_and_training_goes_on(trainer, channel, loss, said, caplog):
    watch, _ = watched(trainer, channel)
    for _ in range(2):
        watch.step(loss)
    watch.step(torch.tensor(1.0))
    frames = channel().of(StepFrame)
    assert [frame.scalars.get("loss") for frame in frames] == [None, None, 1.0]
    assert caplog.text.count("loss not observed") == 1
    assert said in caplog.text
    assert any(reason.startswith("loss: ") for reason in watch.not_observable)


def test_raw_nonfinite_loss_is_taken_whatever_the_log_says(trainer, channel):  # case: SPK-12
    watch, _ = watched(trainer, channel)
    logged = []
    for step in range(1, 61):
        raw = torch.tensor(math.nan) if step == 40 else torch.tensor(2.3)
        logged.append(2.31 if torch.isnan(raw) else raw.item())
        watch.step(raw)
    frames = channel().of(StepFrame)
    assert all(math.isfinite(value) for value in logged)
    assert [frame.step for frame in frames if not math.isfinite(frame.scalars["loss"])] == [40]


def test_step_loss_is_the_mean_of_the_micro_batches(trainer, channel):  # case: SPK-20
    watch, _ = watched(trainer, channel)
    buffer = torch.zeros(())
    for value in (1.0, 2.0, 6.0):
        watch.micro_step(buffer.fill_(value))  # memory that the trainer reuses
    watch.step(buffer)
    for value in (1.0, np.float32(2.0), torch.tensor(3.0)):
        watch.micro_step(value)
    watch.step()
    watch.step(5.0)
    assert [frame.scalars["loss"] for frame in channel().of(StepFrame)] == [3.0, 2.0, 5.0]


def test_tokens_given_counted_or_absent(trainer, channel):
    watch, _ = watched(trainer, channel)
    watch.step(1.0, tokens=77)
    watch.step(1.0)
    for _ in watch.batches([{"input_ids": torch.zeros(2, 5, dtype=torch.int64), "x": torch.zeros(2, 9)}] * 2):
        pass
    watch.step(1.0)
    frames = channel().of(StepFrame)
    assert [frame.scalars.get("tokens") for frame in frames] == [77.0, None, 20.0]
    assert frames[-1].scalars["samples"] == 4.0


def test_evaluation_scores_are_recorded(trainer, channel):
    from fp8watch.records import Evaluation

    watch, _ = watched(trainer, channel)
    watch.step(1.0)
    watch.evaluation({"hellaswag": np.float32(0.5), "piqa": torch.tensor(0.25)})
    for _ in range(5):  # bad input is said once and switches nothing off
        watch.evaluation({"bad": object(), "none": None})
    watch.evaluation({"bad": "x", "arc": 0.75})
    first, second = channel().of(Evaluation)
    assert (first.step, first.scores) == (1, {"hellaswag": 0.5, "piqa": 0.25})
    assert second.scores == {"arc": 0.75}


def test_what_only_the_loop_knows_goes_with_the_step(trainer, channel):
    watch, _ = watched(trainer, channel)
    watch.record(attention_logit_max=torch.tensor(61.5), kurtosis={"blocks.0": 4.0, "blocks.1": torch.tensor(9.0)})
    watch.record(no_such_value=1.0)
    watch.step(1.0)
    watch.step(1.0)
    first, second = channel().of(StepFrame)
    assert first.scalars["attention_logit_max"] == 61.5
    assert (first.scalars["kurtosis:blocks.0"], first.scalars["kurtosis:blocks.1"]) == (4.0, 9.0)
    assert "attention_logit_max" not in second.scalars
    assert "no_such_value" not in first.scalars
    assert watch.failures == {}
    assert any(text.startswith("no_such_value: ") for text in watch.not_observable)
