from __future__ import annotations

import math

import pytest
import torch
from watched_training import Trainer

import fp8watch
from fp8watch.actions.lr_control import LrControl
from fp8watch.records import StepFrame


class Half:
    """An LR rule."""

    def transform(self, lr, *, group, update, position):
        return lr * 0.5


def run(trainer: Trainer, steps: int, scheduler=None, watch=None) -> list[torch.Tensor]:
    for _ in range(steps):
        loss = trainer.loss()
        loss.backward()
        trainer.optimizer.step()
        if scheduler is not None:
            scheduler.step()
        trainer.optimizer.zero_grad()
        if watch is not None:
            watch.step(loss)
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Closed(torch.optim.LBFGS):
    """An optimizer that makes its gradients inside its step."""


def test_an_optimizer_that_wants_a_closure_is_offered_neither_clip_nor_skip(channel):
    trainer = Trainer()
    trainer.optimizer = Closed(trainer.model.parameters(), max_iter=2)
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    assert "closure" in watch.capabilities["skip_update"]
    assert "closure" in watch.capabilities["tighten_clip"]

    def closure():
        trainer.optimizer.zero_grad()
        loss = trainer.loss()
        loss.backward()
        watch.clip_grad_norm_(trainer.model.parameters(), 1.0)
        return loss

    watch.step(trainer.optimizer.step(closure))
    assert watch.capabilities["tighten_clip"] == "", "the loop clips inside the closure"
    assert "closure" in watch.capabilities["skip_update"]
    assert watch.failures == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces its optimizer
def test_a_compiled_caller_of_the_optimizer_gets_no_graph_of_ours(channel):
    """`torch.compile` around `optimizer.step()`, as PyTorch's tutorial has it."""
    import torch._dynamo

    def graphs(*, watched: bool) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer = Trainer(fp8=False)
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=torch.tensor(1e-2))
        watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto") if watched else None
        update = torch.compile(lambda: trainer.optimizer.step(), backend="eager")
        for _ in range(3):
            loss = trainer.loss()
            loss.backward()
            update()
            trainer.optimizer.zero_grad()
            if watch is not None:
                watch.step(loss)
        if watch is not None:
            assert watch.failures == {}
            watch.detach()
        counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return counted, [p.detach().clone() for p in trainer.model.parameters()]

    bare, expected = graphs(watched=False)
    watched, found = graphs(watched=True)
    assert watched == bare
    assert same(found, expected)


def warmup(trainer: Trainer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(trainer.optimizer, start_factor=0.1, total_iters=4)


@pytest.mark.parametrize("order", ["scheduler first", "attach first"])
def test_schedulers_work_before_and_after_attach(channel, order):
    bare = Trainer()
    expected = run(bare, 6, warmup(bare))
    trainer = Trainer()
    scheduler = warmup(trainer) if order == "scheduler first" else None
    watch = fp8watch.attach(trainer.model, trainer.optimizer, lr_scheduler=scheduler)
    scheduler = scheduler or warmup(trainer)
    assert same(run(trainer, 6, scheduler, watch), expected)
    rates = [frame.scalars["learning_rate"] for frame in channel().of(StepFrame)]
    assert rates == pytest.approx([0.001, 0.00325, 0.0055, 0.00775, 0.01, 0.01])
    watch.detach()
    run(trainer, 2, scheduler)  # and after detach


def test_lr_factor_is_in_force_during_the_update_only(channel, monkeypatch):
    half = Trainer(lr=0.005)
    expected = run(half, 3)
    trainer = Trainer(lr=0.01)
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    lr = watch._session.context.lr
    assert isinstance(lr, LrControl)
    lr.add("test", Half())
    assert same(run(trainer, 3, watch=watch), expected)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01
    frame = channel().of(StepFrame)[-1]
    assert (frame.scalars["learning_rate"], frame.scalars["lr_factor"]) == (0.005, 0.5)


def test_lr_comes_back_when_the_update_raises(channel):
    trainer = Trainer(lr=0.01)
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    watch._session.context.lr.add("test", Half())

    def closure() -> torch.Tensor:
        assert trainer.optimizer.param_groups[0]["lr"] == 0.005
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.optimizer.step(closure)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01


def test_norm_is_taken_before_the_update_without_a_clip(channel):
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    loss = trainer.loss()
    loss.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    watch.step(loss)
    assert channel().of(StepFrame)[-1].scalars["grad_norm"] == expected.item()


def test_clipping_is_torchs_own_bit_for_bit(channel):
    twin, trainer = Trainer(), Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    twin.loss().backward()
    trainer.loss().backward()
    expected = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.1)
    found = watch.clip_grad_norm_(trainer.model.parameters(), max_norm=0.1)
    assert torch.equal(found, expected)
    assert same([p.grad for p in trainer.model.parameters()], [p.grad for p in twin.model.parameters()])
    trainer.optimizer.step()
    watch.step(1.0)
    scalars = channel().of(StepFrame)[-1].scalars
    assert (scalars["grad_norm"], scalars["clip_limit"]) == (expected.item(), 0.1)


def test_what_torch_raises_in_a_clip_is_raised(channel):
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    trainer.loss().backward()
    trainer.model[0].weight.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        watch.clip_grad_norm_(trainer.model.parameters(), 1.0, error_if_nonfinite=True)


def test_closure_gradients_are_measured_after_the_update(channel):
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    seen = []

    def closure() -> torch.Tensor:
        trainer.optimizer.zero_grad()
        loss = trainer.loss()
        loss.backward()
        seen.append(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item())
        return loss

    watch.step(trainer.optimizer.step(closure))
    assert channel().of(StepFrame)[-1].scalars["grad_norm"] == seen[-1]


def scaled_step(trainer: Trainer, scaler: torch.amp.GradScaler, watch, *, unscale: bool, poison: bool = False) -> None:
    loss = trainer.loss()
    scaler.scale(loss).backward()
    if poison:
        trainer.model[0].weight.grad[0, 0] = math.inf
    if unscale:
        scaler.unscale_(trainer.optimizer)
    watch.clip_grad_norm_(trainer.model.parameters(), 1e9)
    scaler.step(trainer.optimizer)
    scaler.update()
    trainer.optimizer.zero_grad()
    watch.step(loss)


def test_scaler_norm_is_observed_only_after_unscaling(channel, caplog):
    plain = Trainer()
    plain.loss().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.model.parameters()]).item()
    trainer = Trainer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch = fp8watch.attach(trainer.model, trainer.optimizer, scaler=scaler)
    scaled_step(trainer, scaler, watch, unscale=True)
    scaled_step(trainer, scaler, watch, unscale=False)
    scaled_step(trainer, scaler, watch, unscale=True, poison=True)
    first, second, third = channel().of(StepFrame)
    # Emulated FP8 rounds scaled gradients otherwise; a factor of 1024 would show.
    assert first.scalars["grad_norm"] == pytest.approx(expected, rel=0.1)
    assert first.scalars["loss_scale"] == 1024.0
    assert "grad_norm" not in second.scalars
    assert caplog.text.count("grad_norm not observed") == 1
    assert (first.scalars["update_skipped"], third.scalars["update_skipped"]) == (0.0, 1.0)
    assert third.scalars["loss_scale"] == 512.0


def test_armed_policy_leaves_a_nonfinite_update_out(channel):
    trainer = Trainer()
    scheduler = warmup(trainer)
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    assert watch._session.context.skip.is_armed
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.loss().backward()
    trainer.model[0].weight.grad[0, 0] = math.nan
    watch.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    scheduler.step()
    trainer.optimizer.zero_grad()
    watch.step(float("nan"))
    assert same([p.detach() for p in trainer.model.parameters()], before)
    assert not trainer.optimizer.state
    scalars = channel().of(StepFrame)[-1].scalars
    assert scalars["update_skipped"] == 1.0
    assert "update_rms" not in scalars
    run(trainer, 1, scheduler, watch)
    assert channel().of(StepFrame)[-1].scalars["update_skipped"] == 0.0


def test_observe_leaves_no_update_out(channel):
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    trainer.loss().backward()
    trainer.model[0].weight.grad[0, 0] = math.nan
    trainer.optimizer.step()
    watch.step(1.0)
    assert channel().of(StepFrame)[-1].scalars["update_skipped"] == 0.0
    assert channel().of(StepFrame)[-1].scalars["param_nonfinite"] == 1.0


def test_disarmed_leaves_no_update_out(channel, monkeypatch):
    monkeypatch.setenv("FP8WATCH_DISARM", "1")
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    trainer.loss().backward()
    trainer.model[0].weight.grad[0, 0] = math.nan
    trainer.optimizer.step()
    watch.step(1.0)
    assert channel().of(StepFrame)[-1].scalars["update_skipped"] == 0.0
    assert not channel().preamble[0].armed
