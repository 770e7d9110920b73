"""A warm-up that is learnt while the run goes on: what the controller is told of it, and what it does then."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from watched_training import command

import fp8watch
from fp8watch.policy.fill import NotNow, fill
from fp8watch.policy.load import parse
from fp8watch.policy.state import PolicyState
from fp8watch.policy.view import Trouble, View
from fp8watch.records import CommandResult, Hello, StepFrame

WARMUP = 14


class Stateful:
    """A schedule that counts its calls, so that nobody may call it ahead."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, (step + 1) / (WARMUP + 1))


def warmups(channel) -> list[tuple[int | None, bool]]:
    told = [(hello.warmup_steps, hello.is_warming_up) for hello in channel().of(Hello)]
    return [told[0], *(b for a, b in itertools.pairwise(told) if a != b)]


def test_the_controller_is_told_when_a_warm_up_is_seen_and_when_it_has_ended(trainer, channel):
    from torch.optim.lr_scheduler import LambdaLR

    scheduler = LambdaLR(trainer.optimizer, Stateful())
    watch = fp8watch.attach(trainer.model, trainer.optimizer, lr_scheduler=scheduler, policy="auto")
    assert "not run ahead" in watch.capabilities["lengthen_warmup"]

    def train(steps: int) -> None:
        for _ in range(steps):
            trainer.steps(watch, 1)
            scheduler.step()

    train(11)
    assert watch.capabilities["lengthen_warmup"] == ""
    channel().replies.append(command("lengthen_warmup", params={"stretch": 2.0}))
    train(12)
    answers = [(r.status, r.readback) for r in channel().of(CommandResult) if r.id == "a-lengthen_warmup"]
    assert answers[-1] == ("applied", "ok")
    factors = [frame.scalars["lr_factor"] for frame in channel().of(StepFrame)]
    assert min(factors) < 0.95
    assert warmups(channel) == [(None, True), (WARMUP, False)]


def rung_and_trouble(detector: str, rung: str) -> tuple[Any, Any, Trouble]:
    """A policy of one rule with one rung, that rung, and an incident that the rule is for."""
    policy = parse(f"version: 1\nrules: [{{name: n, when: {{detector: {detector}}}, ladder: [{rung}]}}]", "here")
    (only,) = policy.rules[0].ladder
    trouble = Trouble(
        incident="i", detector=detector, cause="optimisation", severity="act", onset_step=50, first_step=50,
        last_seen_step=52,
    )  # fmt: skip
    return policy, only, trouble


def test_a_policy_takes_the_rung_while_a_warm_up_is_seen_and_not_where_none_is_known():
    policy, rung, trouble = rung_and_trouble("loss_spike", "{action: lengthen_warmup, stretch: 3}")
    view = {"run": "r", "step": 52, "seen": 52}
    params, how = fill(policy, PolicyState(), View(**view, is_warming_up=True), rung, trouble)
    assert (params, "not known" in how) == ({"stretch": 3.0}, True)
    with pytest.raises(NotNow, match="not known"):
        fill(policy, PolicyState(), View(**view), rung, trouble)


def test_a_limit_for_single_tensors_comes_from_the_policy_as_it_is():
    policy, rung, trouble = rung_and_trouble("grad_spike", "{action: tighten_clip, per_tensor: 2}")
    params, _ = fill(policy, PolicyState(), View(run="r", step=52, seen=52), rung, trouble)
    assert params == {"per_tensor": 2.0}
