"""A rollback that would only repeat an earlier one is refused, and one that was right is confirmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TinyRun, everything, same

from fp8watch.errors import CheckpointError


def trained(root: Path, **options: Any) -> TinyRun:
    run = TinyRun(root, every=10, **options)
    run.run(25)
    return run


def first_checkpoint(run: TinyRun) -> str:
    assert run.manager is not None
    return run.manager.records()[0].checkpoint


def test_at_most_one_identical_rollback(tmp_path: Path) -> None:
    """The same batches from the same state under the same setting end the same way: something has to change."""
    run = trained(tmp_path)
    target = first_checkpoint(run)
    run.apply("rollback", checkpoint=target)
    run.run(5)
    before = everything(run)
    with pytest.raises(CheckpointError, match="nothing would be different"):
        run.apply("rollback", checkpoint=target)
    assert same(before, everything(run))
    assert run.apply("rollback", checkpoint=target, skip_batches=1).expected["step"] == 10
    run.run(5)
    run.apply("hold_lr", factor=0.5)
    assert run.apply("rollback", checkpoint=target).expected["step"] == 10


@pytest.mark.parametrize(
    "change",
    [
        {"action": "rewarm", "params": {"steps": 3, "start_factor": 0.5}},
        {"action": "hold_lr", "params": {"to_lr": 1e-3, "steps": 50}},
        {"action": "bf16_layers", "params": {"layers": ["3"]}},
        {"action": "tighten_clip", "params": {"max_norm": 0.01}},
    ],
    ids=lambda change: change["action"],
)
def test_the_same_changes_make_no_difference_the_second_time(tmp_path: Path, change: dict[str, Any]) -> None:
    run = trained(tmp_path)
    target = first_checkpoint(run)
    run.apply("rollback", checkpoint=target, changes=[change])
    run.run(2)
    with pytest.raises(CheckpointError, match="nothing would be different"):
        run.apply("rollback", checkpoint=target, changes=[change])
    run.apply("raise_margin", bits=1)
    if change["action"] != "tighten_clip":  # a limit has to be lower than the one in force
        assert run.apply("rollback", checkpoint=target, changes=[change]).expected["step"] == 10


def test_the_same_change_for_one_more_layer_makes_a_difference(tmp_path: Path) -> None:
    run = trained(tmp_path)
    target = first_checkpoint(run)
    one, other = ({"action": "bf16_layers", "params": {"layers": [layer]}} for layer in ("3", "0"))
    run.apply("rollback", checkpoint=target, changes=[one])
    run.run(2)
    assert run.apply("rollback", checkpoint=target, changes=[other, one]).expected["step"] == 10


def test_an_update_that_the_scaler_leaves_out_is_no_sign_of_a_lost_step(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    run = trained(tmp_path, scaler=scaler)
    applied = run.apply("rollback", checkpoint=first_checkpoint(run))

    def overflow() -> None:
        next(run.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]

    run.spoil = overflow
    run.step()
    run.spoil = None
    run.run(1)
    found = run.read_back("rollback", applied)
    assert (found.ok, found.detail) == (True, "")
