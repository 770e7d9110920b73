"""`torch.set_default_device` is the loop's own business: what is meant for the host or for a device says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from watched_training import Trainer

import fp8watch
from fp8watch.capture.ring import Ring
from fp8watch.records import StepFrame


@pytest.fixture
def meta() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_the_ring_keeps_its_buffers_on_the_host(meta):
    ring: Ring[int] = Ring(torch.device("cpu"), slot_bytes=4096)
    ring.push({"x": torch.tensor([1.0, 2.0], device="cpu")}, 7)
    [(note, values)] = ring.poll(wait=True)
    assert note == 7
    assert values["x"].tolist() == [1.0, 2.0]


def observed(trainer, channel, watch, default: str | None) -> list[dict[str, float]]:
    torch.set_default_device(default)
    try:
        trainer.steps(watch, 4)
        watch.detach()
    finally:
        torch.set_default_device(None)
    assert watch.failures == {}
    kept = ("loss", "grad_norm", "learning_rate")
    return [{name: frame.scalars[name] for name in kept} for frame in channel().of(StepFrame)]


def test_a_run_is_watched_alike_whatever_the_default_device(channel):
    found = []
    for default in (None, "meta"):
        trainer = Trainer()
        torch.set_default_device(default)
        try:
            watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
        finally:
            torch.set_default_device(None)
        found.append(observed(trainer, channel, watch, default))
    assert len(found[0]) == 4
    assert found[0] == found[1]


class PlainScaler:
    """A loss scaler of another make: no `is_enabled`."""

    def get_scale(self) -> float:
        return 1.0

    def update(self, scale: float | None = None) -> None:
        return None


def test_a_scaler_without_is_enabled_is_taken_as_enabled(trainer, channel):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto", scaler=PlainScaler())
    trainer.steps(watch, 3)
    assert watch.capabilities["adjust_loss_scale"] == ""
    assert "GradScaler" in watch.capabilities["skip_update"]
    assert watch.failures == {}
    assert len(channel().of(StepFrame)) >= 2


class NoUpdate:
    """Scales the loss, and cannot be given another scale."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def test_what_is_no_scaler_is_said(trainer, channel):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto", scaler=NoUpdate())
    assert "no GradScaler" in watch.capabilities["adjust_loss_scale"]


def test_a_skip_guard_that_is_switched_off_is_said(trainer, channel, monkeypatch):
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy="auto")
    monkeypatch.setattr("fp8watch.actions.skip_guard.total_norm", lambda *args: 1 / 0)
    trainer.steps(watch, 5, clip=None)
    assert watch.failures["skip_update"] == 3
    assert "division by zero" in watch.capabilities["skip_update"]
    assert any("skip_update" in reason and "division by zero" in reason for reason in watch.not_observable)
