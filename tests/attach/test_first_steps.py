"""The first steps of a training are watched, though the process that watches them comes up seconds later."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from watched_training import Trainer, stored_steps

import fp8watch
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import Finding, StepFrame
from fp8watch.settings import Settings
from fp8watch.transport.process import AgentProcess


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(dir=tmp_path / "fp8watch", metrics_port=0, report=False, start_seconds=60.0)


@pytest.fixture
def may_start(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The background process starts no sooner than this is set, as on a busy machine."""
    start, event = AgentProcess.start, threading.Event()

    def start_late(process: AgentProcess) -> None:
        event.wait(60.0)  # on the transport thread
        start(process)

    monkeypatch.setattr(AgentProcess, "start", start_late)
    monkeypatch.setattr("fp8watch.training.watch.CLOSE_SECONDS", 60.0)
    return event


def test_a_fault_in_the_third_step_is_found_in_the_third_step(
    trainer: Trainer, settings: Settings, may_start: threading.Event
) -> None:
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r", settings=settings)
    trainer.steps(watch, 2)
    inputs, trainer.inputs = trainer.inputs, torch.full_like(trainer.inputs, torch.nan)
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.steps(watch, 1)
    trainer.inputs = inputs
    with torch.no_grad():
        for parameter, kept in zip(trainer.model.parameters(), weights, strict=True):
            parameter.copy_(kept)
    trainer.steps(watch, 27)
    assert not watch._session.uplink._channel.is_connected, "training has run ahead of the process"
    may_start.set()
    watch.detach()
    path = settings.dir / "runs" / "r" / "store.sqlite"
    assert stored_steps(path, "r", 30) == list(range(1, 31))
    store = SqliteStore(path, read_only=True)
    found = [finding for finding in store.read("r", Finding) if finding.detector == "nonfinite"]
    store.close()
    assert [(finding.step, finding.onset_step) for finding in found] == [(3, 3)]


def test_a_policy_that_acts_begins_with_somebody_to_act(
    trainer: Trainer, settings: Settings, may_start: threading.Event
) -> None:
    threading.Timer(1.0, may_start.set).start()
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r", settings=settings, policy="auto")
    assert watch._session.uplink._channel.is_connected
    assert watch.global_step == 0


def test_training_begins_when_nobody_comes(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(dir=tmp_path / "w", agent=f"unix://{tmp_path}/none.sock", start_seconds=0.3, report=False)
    started = time.monotonic()
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r", settings=settings, policy="auto")
    assert time.monotonic() - started < 5.0
    assert "no agent has answered yet" in caplog.text
    trainer.steps(watch, 2)
    assert watch.global_step == 2


def test_steps_that_find_the_ring_full_are_counted_and_told(trainer, channel) -> None:
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r")
    trainer.steps(watch, 1)
    ring = watch._recorder._ring
    free = list(ring._free)
    ring._free.clear()  # as when a GPU is many steps behind
    trainer.steps(watch, 2)
    ring._free.extend(free)
    trainer.steps(watch, 1)
    assert [frame.step for frame in channel().of(StepFrame)] == [1, 4]
    assert channel().dropped == {"ring_full": 2}
