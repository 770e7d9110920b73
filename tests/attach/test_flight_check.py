"""Parameters that were bad before training began are named, and that is what the finding says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fp8watch
from fp8watch.capture.flight_check import FlightCheck
from fp8watch.controller.merge import merge
from fp8watch.detect.pipeline import Pipeline
from fp8watch.policy.load import load
from fp8watch.records import StepFrame


def named(frames: list[StepFrame]) -> list[str]:
    return [key.partition(":")[2] for frame in frames for key in frame.scalars if key.startswith("bad_parameter:")]


def findings(frames: list[StepFrame]):
    pipeline = Pipeline("run")
    return [found for frame in frames for found in pipeline.observe(merge([frame], {}))]


def test_a_parameter_that_was_loaded_as_nan_is_named_in_the_first_step(trainer, channel, caplog):  # case: NUM-34
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    name, parameter = list(trainer.model.named_parameters())[-1]
    with torch.no_grad():  # loaded after attach
        parameter.view(-1)[0] = math.nan
    trainer.steps(watch, 3)
    frames = channel().of(StepFrame)
    assert frames[0].scalars["bad_parameters"] == 1.0
    assert named(frames) == [name]
    assert all("bad_parameters" not in frame.scalars for frame in frames[1:])
    found = findings(frames)
    assert [(f.detector, f.severity, f.step) for f in found] == [("nonfinite", "act", 1)]
    assert found[0].evidence["bad_before_training"] == [name]
    assert "parameters" in found[0].evidence["quantities"]
    assert f"{name} held NaN or infinity: bad before training" in caplog.text


def test_a_sound_model_and_exact_zeros_are_no_finding(trainer, channel, caplog):  # case: NUM-34, NUM-09
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if p.dim() == 2)
    with torch.no_grad():
        parameter.zero_()
    trainer.steps(watch, 2)
    frames = channel().of(StepFrame)
    assert frames[0].scalars["bad_parameters"] == 0.0
    assert named(frames) == []
    assert findings(frames) == []
    assert f"{name} held nothing but zeros" in caplog.text


def test_where_names_are_late_the_count_says_it():
    frame = StepFrame(
        run="run", attempt=0, rank=0, step=1, layout_id=0, time_unix=0.0, scalars={"loss": 2.0, "bad_parameters": 3.0}
    )
    (found,) = findings([frame])
    assert (found.detector, found.evidence["bad_before_training"]) == ("nonfinite", 3)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sound = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
        self.masked = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)
        self.frozen = nn.Parameter(torch.tensor([0.0, math.nan]), requires_grad=False)
        self.infinite = nn.Parameter(torch.tensor([[math.inf, 0.0]], dtype=torch.float16))
        self.adapter = nn.Parameter(torch.zeros(2, 2))
        self.bias = nn.Parameter(torch.zeros(2))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.elsewhere = nn.Parameter(torch.zeros(2, 2, device="meta"))
        self.whole = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)


def test_dtypes_masks_adapters_and_what_cannot_be_looked_at():
    check = FlightCheck(Odd())
    assert check.is_due
    assert float(check.start()) == 2.0
    assert not check.is_due
    found = check.take()
    assert (found.nonfinite, found.zero) == (["frozen", "infinite"], ["adapter"])
    assert check.take() is None
    assert check.start() is None


def test_a_model_without_parameters():
    assert FlightCheck(nn.Identity()).start() is None


def test_many_bad_names_are_cut_short(trainer, channel, caplog):
    names = 40
    trainer.model[0].many = nn.ParameterList([nn.Parameter(torch.full((2,), math.nan)) for _ in range(names)])
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    trainer.steps(watch, 1)
    frames = channel().of(StepFrame)
    assert frames[0].scalars["bad_parameters"] == names
    assert len(named(frames)) == 16
    assert f"and {names - 16} more" in caplog.text


@pytest.mark.parametrize("name", ["auto", "conservative", "finetune", "fp8-pretraining"])
def test_no_rule_for_it_touches_rate_or_clipping(name):  # case: NUM-34
    rules = [rule for rule in load(name).rules if "nonfinite" in rule.when.detector]
    assert rules
    actions = {rung.action for rule in rules for rung in rule.ladder}
    assert actions
    assert not actions & {"hold_lr", "rewarm", "lengthen_warmup", "tighten_clip"}
