"""Each fault does what its scenario says, where it says, and comes back only where it says so."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from fp8watch.demo.config import TrainingConfig
from fp8watch.demo.data import Windows
from fp8watch.demo.scenarios.base import Fault, Setting
from fp8watch.demo.scenarios.catalogue import SCENARIOS
from fp8watch.demo.schedule import schedule
from fp8watch.demo.trainer import Bare, Training, build, train

TINY = TrainingConfig(steps=8, batch_size=2, length=16, num_layers=1, width=32)
LAYER = "blocks.0.mlp.down"
FAULT_STEP = 4


def make(name: str, config: TrainingConfig = TINY, layer: str | None = LAYER) -> Fault:
    chosen = layer if SCENARIOS[name].takes_layer else None
    return SCENARIOS[name].make(Setting(config=config, fault_step=FAULT_STEP, layer=chosen))


@dataclass
class Seen(Bare):
    """A bare loop that keeps a copy of what a test asks for at every boundary."""

    training: Training
    global_step: int = 0
    scales: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)

    @property
    def module(self) -> torch.nn.Module:
        return self.training.model.get_submodule(LAYER)

    def clip_grad_norm_(self, parameters: object, max_norm: float) -> torch.Tensor:
        self.grads.append(self.module.weight.grad.clone())
        return super().clip_grad_norm_(parameters, max_norm)

    def step(self, loss: torch.Tensor, /) -> None:
        super().step(loss)
        self.scales.append(torch.cat((self.module.scaling_forward.scale, self.module.scaling_backward.scale)))
        self.weights.append(self.module.weight.detach().clone())


def run(name: str, config: TrainingConfig = TINY, layer: str | None = LAYER) -> tuple[Seen, list[float]]:
    training = build(config, make(name, config, layer))
    seen = Seen(training)
    losses: list[float] = []
    train(training, seen, lambda step, loss: losses.append(loss))
    return seen, losses


def test_frozen_scales_are_64_times_too_large_and_stay() -> None:
    seen, _ = run("frozen-scale", layer=None)
    healthy, _ = run("healthy")
    before, after = seen.scales[FAULT_STEP - 2], seen.scales[FAULT_STEP - 1]
    assert torch.equal(before, healthy.scales[FAULT_STEP - 2])
    assert torch.equal(after, before * 64)
    assert torch.equal(seen.scales[-1], after)


def test_a_scale_written_into_a_frozen_state_takes_effect_and_stays() -> None:
    training = build(TINY, make("frozen-scale", layer=None))
    module = training.model.get_submodule(LAYER)

    class Repaired(Bare):
        def step(self, loss: torch.Tensor, /) -> None:
            super().step(loss)
            if self.global_step == FAULT_STEP + 1:
                module.scaling_forward.scale.fill_(3.0)

    train(training, Repaired(), lambda step, loss: None)
    assert module.scaling_forward.scale.tolist() == [3.0, 3.0]


def test_a_named_layer_alone_is_frozen() -> None:
    seen, _ = run("frozen-scale", layer="blocks.0.attention.qkv")
    healthy, _ = run("healthy")
    step = FAULT_STEP - 1
    assert torch.allclose(seen.scales[step], healthy.scales[step], rtol=0.5)


def test_gradient_scales_are_too_small_and_a_purge_mends_them() -> None:
    training = build(TINY, make("gradient-underflow", layer=None))
    seen = Seen(training)
    train(training, seen, lambda step, loss: None)
    forward, backward = seen.module.scaling_forward, seen.module.scaling_backward
    assert seen.scales[FAULT_STEP - 1][2] == seen.scales[FAULT_STEP - 2][2] * 2.0**-24
    assert seen.scales[-1][2] == seen.scales[FAULT_STEP - 1][2]
    assert torch.isfinite(forward.amax_history).all()
    healthy, _ = run("healthy")
    before, after = (seen.grads[step] - healthy.grads[step] for step in (FAULT_STEP - 2, FAULT_STEP - 1))
    assert not before.any()
    assert after.any()
    backward.purge(seen.module.recipe)
    assert backward.scale[0] > seen.scales[-1][2] * 2.0**20


def test_one_nan_makes_one_step_nan_and_does_not_come_again() -> None:
    fault = make("nan-loss")
    training = build(TINY, fault)
    losses: list[float] = []

    class Skipping(Bare):
        def clip_grad_norm_(self, parameters: object, max_norm: float) -> torch.Tensor:
            norm = super().clip_grad_norm_(parameters, max_norm)
            if not torch.isfinite(norm):
                for parameter in training.model.parameters():
                    parameter.grad = None
            return norm

    train(training, Skipping(), lambda step, loss: losses.append(loss))
    assert [step for step, loss in enumerate(losses, start=1) if loss != loss] == [FAULT_STEP]
    fault.before_step(FAULT_STEP)
    assert torch.isfinite(training.model(torch.zeros(1, 4, dtype=torch.int64))).all()


def test_unwatched_a_nan_spoils_every_step_after_it() -> None:
    _, losses = run("nan-loss")
    assert all(loss == loss for loss in losses[: FAULT_STEP - 1])
    assert all(loss != loss for loss in losses[FAULT_STEP - 1 :])


def test_a_bit_flip_changes_one_weight() -> None:
    fault = make("bit-flip")
    model = build(TINY, fault).model
    before = model.get_submodule(LAYER).weight.detach().clone()
    fault.before_step(FAULT_STEP)
    after = model.get_submodule(LAYER).weight.detach().clone()
    changed = (before != after).nonzero()
    assert len(changed) == 1
    assert after[tuple(changed[0])] == before[tuple(changed[0])] * 2.0**20
    fault.before_step(FAULT_STEP)
    assert torch.equal(model.get_submodule(LAYER).weight, after)


def test_an_outlier_channel_lasts_two_steps_and_touches_one_channel() -> None:
    fault = make("outlier-channel")
    training = build(TINY, fault)
    inputs = []
    training.model.get_submodule(LAYER).register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    for step in range(FAULT_STEP - 1, FAULT_STEP + 3):
        fault.before_step(step)
        with torch.no_grad():  # no update of the scales in between
            training.model(tokens)
    plain, first, second, later = inputs
    assert torch.equal(plain, later)
    assert torch.equal(first, second)
    channels = (first != plain).any(dim=0).any(dim=0).nonzero().view(-1)
    assert len(channels) == 1
    assert torch.equal(first[..., channels], plain[..., channels] * 64)


def test_bad_batches_are_ten_and_the_same_when_read_again() -> None:
    windows = Windows(seed=0, num_samples=80, length=16)
    faulty = make("bad-batch").dataset(windows)
    size = TINY.batch_size
    bad = [i for i in range(80) if not torch.equal(faulty[i][1], windows[i][1])]
    assert bad == list(range((FAULT_STEP - 1) * size, (FAULT_STEP - 1 + 10) * size))
    assert all(torch.equal(faulty[i][0], windows[i][0]) for i in bad)
    assert torch.equal(faulty[bad[0]][1], faulty[bad[0]][1])


def test_one_batch_in_fifteen_is_heavy() -> None:
    windows = Windows(seed=0, num_samples=200, length=16)
    faulty = make("grad-bursts").dataset(windows)
    heavy = {i // TINY.batch_size + 1 for i in range(200) if faulty[i][2] == 300}
    assert heavy == set(range(FAULT_STEP, 101, 15))
    assert {float(faulty[i][2]) for i in range(200)} == {1.0, 300.0}


def test_the_learning_rate_is_30_times_too_high_for_40_steps_by_position() -> None:
    plain = schedule(warmup_steps=3, steps=100, floor=0.1)
    faulty = make("lr-too-high").schedule(plain)
    raised = [position + 1 for position in range(100) if faulty(position) != plain(position)]
    assert raised == list(range(FAULT_STEP, FAULT_STEP + 40))
    assert faulty(FAULT_STEP) == pytest.approx(30 * plain(FAULT_STEP))


def test_a_fault_leaves_the_steps_before_it_as_they_were() -> None:
    _, healthy = run("healthy")
    for name in SCENARIOS:
        if SCENARIOS[name].takes_fault_step and not SCENARIOS[name].both:
            _, losses = run(name)
            assert losses[: FAULT_STEP - 1] == healthy[: FAULT_STEP - 1], name
