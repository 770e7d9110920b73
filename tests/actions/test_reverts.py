"""A revert is read back like any action, and takes away its own action alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TinyRun

from fp8watch.actions.adjust_loss_scale import AdjustLossScale
from fp8watch.actions.clip_control import ClipControl
from fp8watch.actions.lr_control import LrControl
from fp8watch.actions.skip_guard import SkipGuard
from fp8watch.capture.emulated_controls import EmulatedControls
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.emulation.linear import Fp8Linear

REVERTIBLE: dict[str, tuple[dict[str, Any], tuple[type, str]]] = {
    "hold_lr": ({"factor": 0.5}, (LrControl, "remove")),
    "rewarm": ({"steps": 50, "start_factor": 0.1}, (LrControl, "remove")),
    "lengthen_warmup": ({"factor": 2.0}, (LrControl, "remove")),
    "tighten_clip": ({"max_norm": 0.01}, (ClipControl, "set_limit")),
    "bf16_layers": ({"layers": ["0"]}, (Fp8Linear, "set_high_precision")),
    "bf16_all": ({}, (Fp8Linear, "set_high_precision")),
    "raise_margin": ({"bits": 1}, (EmulatedControls, "set_margin")),
    "skip_update": ({"max_consecutive": 2}, (SkipGuard, "disarm")),
    "adjust_loss_scale": ({"factor": 0.5}, (AdjustLossScale, "_set")),
    "checkpoint_cadence": ({"every": 7}, (CheckpointManager, "set_every")),
}
"""Action -> its parameters, and the one call by which its revert does anything."""


def run_with(name: str, folder: Path) -> TinyRun:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if name == "adjust_loss_scale" else None
    run = TinyRun(folder, scaler=scaler, peak_at=40, every=100)
    run.run(4)
    return run


@pytest.mark.parametrize("name", REVERTIBLE)
def test_a_revert_that_does_nothing_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(name, tmp_path)
    params, (owner, method) = REVERTIBLE[name]
    applied = run.apply(name, **params)
    run.run(2)
    monkeypatch.setattr(owner, method, lambda *_: None)
    run.actions[name].revert(applied)
    run.run(1)
    assert run.actions[name].read_back_revert(applied).ok is not True


@pytest.mark.parametrize("name", REVERTIBLE)
def test_a_revert_is_confirmed(name: str, tmp_path: Path) -> None:
    run = run_with(name, tmp_path)
    params, _ = REVERTIBLE[name]
    applied = run.apply(name, **params)
    if name != "adjust_loss_scale":  # the scaler changes its scale itself
        run.run(2)
    run.actions[name].revert(applied)
    if name.startswith("bf16"):
        assert run.actions[name].read_back_revert(applied).ok is None
        run.run(1)
    assert run.actions[name].read_back_revert(applied).ok is True


def test_modules_that_another_action_holds_are_not_waited_for(tmp_path: Path) -> None:
    run = run_with("bf16_all", tmp_path)
    one, both = run.apply("bf16_layers", layers=["0"]), run.apply("bf16_all")
    run.run(1)
    run.actions["bf16_layers"].revert(one)
    run.run(1)
    assert run.actions["bf16_layers"].read_back_revert(one).ok is True
    assert run.read_back("bf16_all", both).ok is True


@pytest.mark.parametrize("first", [0, 1])
def test_clip_limits_side_by_side(tmp_path: Path, first: int) -> None:
    """In whichever order they are reverted, the lowest of the others applies, and none is left in the end."""
    run = run_with("tighten_clip", tmp_path)
    limits = [0.5, 0.25]
    applied = [run.apply("tighten_clip", max_norm=limit) for limit in limits]
    run.actions["tighten_clip"].revert(applied[first])
    assert run.context.clip.limit == limits[1 - first]
    assert run.context.skip.is_armed
    run.actions["tighten_clip"].revert(applied[1 - first])
    assert run.context.clip.limit is None
    assert not run.context.skip.is_armed


@pytest.mark.parametrize("first", [0, 1])
def test_cadences_side_by_side(tmp_path: Path, first: int) -> None:
    run = run_with("checkpoint_cadence", tmp_path)
    cadences = [50, 10]
    applied = [run.apply("checkpoint_cadence", every=every) for every in cadences]
    run.actions["checkpoint_cadence"].revert(applied[first])
    assert run.manager is not None
    assert run.manager.every == cadences[1 - first]
    run.actions["checkpoint_cadence"].revert(applied[1 - first])
    assert run.manager.every == 100


def test_reverting_one_skip_update_leaves_the_other_armed(tmp_path: Path) -> None:
    run = run_with("skip_update", tmp_path)
    first, second = (run.apply("skip_update", max_consecutive=limit) for limit in (5, 1))
    run.actions["skip_update"].revert(first)
    run.run(1)
    assert run.context.skip.is_armed
    assert run.context.skip.max_in_a_row == 1
    assert run.read_back("skip_update", second).ok is True
    run.actions["skip_update"].revert(second)
    assert not run.context.skip.is_armed


def test_modules_that_cannot_all_be_switched_are_none_of_them_switched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with("bf16_all", tmp_path)
    switch = Fp8Linear.set_high_precision
    second = [layer for layer in run.model if isinstance(layer, Fp8Linear)][1]

    def explode(layer: Fp8Linear, high_precision: bool) -> None:
        if high_precision and layer is second:
            raise RuntimeError("cannot switch")
        switch(layer, high_precision)

    monkeypatch.setattr(Fp8Linear, "set_high_precision", explode)
    with pytest.raises(Exception, match="cannot switch"):
        run.apply("bf16_all")
    run.run(1)
    controls = run.context.controls
    assert controls is not None
    assert controls.ran_high_precision(controls.modules()) == [False, False]
    assert run.context.high_precision == {}
