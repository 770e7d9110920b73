from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_run import TinyRun, everything, same
from torch import nn

from fp8watch.actions import checkpoint_actions
from fp8watch.actions.adjust_loss_scale import AdjustLossScale
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.halt import Halt
from fp8watch.actions.registry import capabilities
from fp8watch.checkpoints import Checkpoints
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.errors import ActionError, CheckpointError
from fp8watch.records import ACTIONS


def test_every_action_has_an_entry_and_says_why_it_cannot(tmp_path: Path) -> None:
    bare = TinyRun(fp8=False, schedule=lambda step: 1.0)
    assert set(bare.actions) == set(ACTIONS)
    assert all(action.name == name for name, action in bare.actions.items())
    can = {name for name, reason in capabilities(bare.actions).items() if not reason}
    assert can == {"rewarm", "hold_lr", "tighten_clip", "skip_update", "halt"}
    full = TinyRun(tmp_path, scaler=torch.amp.GradScaler("cpu"))
    cannot = {name for name, reason in capabilities(full.actions).items() if reason}
    assert cannot == {"skip_update", "recheck"}


def test_loss_scale_read_back_and_revert() -> None:
    run = TinyRun(fp8=False, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    run.run(2)
    applied = run.apply("adjust_loss_scale", factor=0.25)
    assert run.scaler.get_scale() == 256.0
    assert run.read_back("adjust_loss_scale", applied).ok is True
    run.step()
    assert run.scaler.get_scale() == 256.0
    run.actions["adjust_loss_scale"].revert(applied)
    assert run.scaler.get_scale() == 1024.0
    assert run.read_back("adjust_loss_scale", applied).ok is False


def test_a_loss_scale_that_is_not_set_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(fp8=False, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    run.run(2)
    monkeypatch.setattr(AdjustLossScale, "_set", lambda *_: None)
    applied = run.apply("adjust_loss_scale", factor=0.25)
    assert run.read_back("adjust_loss_scale", applied).ok is False


def test_the_loss_scale_can_be_set_between_the_scalers_step_and_its_update() -> None:
    run = TinyRun(fp8=False, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    run.run(2)
    loss = run.model(torch.ones(8, 16)).pow(2).mean()
    run.scaler.scale(loss).backward()
    run.scaler.step(run.optimizer)
    applied = run.apply("adjust_loss_scale", factor=0.5)
    run.scaler.update()
    assert run.read_back("adjust_loss_scale", applied).ok is True
    assert run.scaler.get_scale() == 512.0


def test_loss_scale_of_an_unused_scaler_and_out_of_range() -> None:
    run = TinyRun(fp8=False, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    with pytest.raises(ActionError, match="not been used"):
        run.apply("adjust_loss_scale", factor=0.5)
    run.step()
    for params in ({"factor": 0.0}, {"value": 1e40}, {}):
        with pytest.raises(ActionError):
            run.apply("adjust_loss_scale", **params)
    assert run.scaler.get_scale() == 1024.0


def checked(run: TinyRun, applied: Applied, seconds: float = 20.0) -> ReadBack:
    """What the read-back comes to, boundary after boundary."""
    deadline = time.monotonic() + seconds
    while (found := run.read_back("checkpoint_now", applied)).ok is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


def test_checkpoint_now_is_read_back_from_disk(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.run(3)
    applied = run.apply("checkpoint_now")
    assert checked(run, applied).ok is True
    (Path(applied.expected["path"]) / "model.pt").write_bytes(b"")
    assert checked(run, applied).ok is False
    run.actions["checkpoint_now"].revert(applied)  # one that is complete stays
    assert run.manager is not None
    assert [record.checkpoint for record in run.manager.records()] == [applied.expected["checkpoint"]]


def test_a_save_that_writes_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(tmp_path)
    run.run(3)
    assert run.manager is not None
    real = run.manager.save(3)
    nowhere = msgspec.structs.replace(real, checkpoint="step-00000004", path=str(tmp_path / "step-00000004"))
    monkeypatch.setattr(run.manager, "save", lambda *args, **kwargs: nowhere)
    run.step()
    found = checked(run, run.apply("checkpoint_now"))
    assert found.ok is False
    assert "never completed" in found.detail


def test_its_files_are_checked_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: it is not given up meanwhile. What is wrong with them is found out."""
    gate, threads = threading.Event(), []
    real = checkpoint_actions.verify

    def slow(*args: Any, **kwargs: Any) -> None:
        threads.append(threading.current_thread())
        assert gate.wait(30)
        real(*args, **kwargs)

    monkeypatch.setattr(checkpoint_actions, "verify", slow)
    run = TinyRun(tmp_path)
    run.run(3)
    applied = run.apply("checkpoint_now")
    began = time.monotonic()
    for _ in range(5):
        found = run.read_back("checkpoint_now", applied)
        assert (found.ok, found.detail) == (None, "its files are being checked")
        assert run.actions["checkpoint_now"].patience > 10**6  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5
    file = Path(applied.expected["path"]) / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    gate.set()
    found = checked(run, applied)
    assert found.ok is False
    assert "model.pt" in found.detail
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert run.actions["checkpoint_now"].patience == checkpoint_actions.PATIENCE  # type: ignore[attr-defined]


def test_while_it_is_being_saved_it_is_not_done_and_can_be_withdrawn(tmp_path: Path) -> None:
    gate = threading.Event()
    pool = ThreadPoolExecutor(1)
    run = TinyRun(tmp_path)
    assert run.manager is not None
    run.manager.close(0.0)
    config = Checkpoints(tmp_path, save=lambda folder: pool.submit(gate.wait, 30), load=print)
    run.context.checkpoints = CheckpointManager(config, run.context.parts, run="tiny", attempt=lambda: 0)
    run.run(1)
    applied = run.apply("checkpoint_now")
    assert run.read_back("checkpoint_now", applied).ok is None
    run.actions["checkpoint_now"].revert(applied)
    assert run.context.checkpoints.records() == []
    assert run.context.checkpoints.pending == []
    gate.set()
    pool.shutdown()


def test_a_save_that_fails_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(tmp_path)
    run.run(3)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run.apply("checkpoint_now")
    run.step()


def test_cadence_read_back_and_revert(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, every=100)
    applied = run.apply("checkpoint_cadence", every=2)
    assert run.read_back("checkpoint_cadence", applied).ok is True
    run.run(4)
    assert run.manager is not None
    assert [record.step for record in run.manager.records()] == [2, 4]
    run.actions["checkpoint_cadence"].revert(applied)
    assert run.manager.every == 100
    assert run.read_back("checkpoint_cadence", applied).ok is False
    with pytest.raises(ActionError):
        run.apply("checkpoint_cadence", every=0)


def test_a_cadence_that_is_ignored_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(tmp_path, every=100)
    monkeypatch.setattr(run.manager, "set_every", lambda every: None)
    assert run.read_back("checkpoint_cadence", run.apply("checkpoint_cadence", every=2)).ok is False


def test_halt_sets_the_reason_and_can_be_withdrawn() -> None:
    run = TinyRun(fp8=False)
    applied = run.apply("halt", reason="two rollbacks in a day")
    assert run.context.halt_reason == "two rollbacks in a day"
    assert run.read_back("halt", applied).ok is True
    run.actions["halt"].revert(applied)
    assert run.context.halt_reason is None
    assert run.read_back("halt", applied).ok is False


def test_a_halt_that_reaches_nobody_is_noticed() -> None:
    class Deaf:
        halt_reason = None

        def __setattr__(self, name: str, value: object) -> None:
            pass

    halt = Halt(Deaf())  # type: ignore[arg-type]
    assert halt.read_back(halt.apply(1, {"reason": "test"})).ok is False


def test_a_recheck_that_computes_nothing_is_noticed() -> None:
    run = TinyRun(fp8=False)
    run.run(1)
    run.context.forward = lambda: torch.zeros((), requires_grad=True) * 1.0
    found = run.read_back("recheck", run.apply("recheck"))
    assert found.ok is False
    assert "nothing was compared" in found.detail


def with_forward(run: TinyRun) -> None:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)
    run.context.forward = lambda: nn.functional.mse_loss(run.model(inputs), targets)


def test_recheck_agrees_on_a_sound_device_and_leaves_no_trace() -> None:
    run = TinyRun(fp8=True)
    run.run(3)
    with_forward(run)
    before = everything(run)
    applied = run.apply("recheck")
    assert applied.expected["agree"] is True
    assert same(before, everything(run))
    assert run.read_back("recheck", applied).ok is True
    twin = TinyRun(fp8=True)
    twin.run(6)
    third = TinyRun(fp8=True)
    third.run(3)
    with_forward(third)
    third.apply("recheck")
    third.run(3)
    assert third.losses == twin.losses


def test_recheck_sees_one_flipped_bit() -> None:
    run = TinyRun(fp8=True)
    run.run(3)
    with_forward(run)
    calls: list[int] = []

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            gradient = gradient.clone()
            gradient.view(torch.int32)[0] ^= 1
        return gradient

    run.model.get_submodule("3").bias.register_hook(flip)
    applied = run.apply("recheck")
    assert applied.expected["agree"] is False
    assert "differ" in run.read_back("recheck", applied).detail


def test_recheck_puts_everything_back_when_the_forward_fails() -> None:
    run = TinyRun(fp8=True)
    run.run(3)
    before = everything(run)

    def explode() -> torch.Tensor:
        run.model(torch.ones(8, 16))
        raise RuntimeError("out of memory")

    run.context.forward = explode
    with pytest.raises(ActionError, match="out of memory"):
        run.apply("recheck")
    assert same(before, everything(run))
