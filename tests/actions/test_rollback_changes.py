"""The changes that are made with a rollback: all of them on every rank, or none on any, also if one fails half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_rollback import first_checkpoint, trained
from tiny_run import TinyRun, same

from fp8watch import rng
from fp8watch.actions import rollback as rollback_module
from fp8watch.actions.base import Applied
from fp8watch.actions.joint import Answer
from fp8watch.checkpoints.restore import PartlyRestored


class Asks:
    """The other ranks: all is well with them, or they could not make the changes."""

    def __init__(self, changes: Answer = Answer.YES) -> None:
        self.changes = changes
        self.asked: list[tuple[Answer, str]] = []

    def __call__(self, answer: Answer, about: str) -> Answer:
        self.asked.append((answer, about))
        return min(answer, self.changes) if about == "changes" else answer


def changing(run: TinyRun, ask: Asks, *changes: dict[str, Any]) -> Applied:
    rollback: Any = run.actions["rollback"]
    params = {"checkpoint": first_checkpoint(run), "changes": list(changes)}
    rollback.choose(run.global_step, params, ask)
    return rollback.apply(run.global_step, params)


HOLD = {"action": "hold_lr", "params": {"factor": 0.5, "restore_steps": 10}}
BF16 = {"action": "bf16_layers", "params": {"layers": ["0", "3"]}}


def fails_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, times: int = 1) -> None:
    """The next call, or calls, do their work and raise."""
    own, done = getattr(owner, name), []

    def call(*args: Any, **options: Any) -> None:
        own(*args, **options)
        if len(done) < times:
            done.append(1)
            raise RuntimeError("out of memory")

    monkeypatch.setattr(owner, name, call)


@pytest.fixture(params=[True, False], ids=["alone", "several ranks"])
def is_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(rollback_module._Chosen, "is_alone", property(lambda chosen: request.param))
    return bool(request.param)


def test_a_change_that_fails_half_way_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    run = trained(tmp_path)
    fails_after(monkeypatch, run.context.controls, "set_high_precision")
    ask = Asks()
    applied = changing(run, ask, HOLD, BF16)
    assert ask.asked[-1] == (Answer.DAMAGED, "changes")
    assert [layer.is_high_precision for layer in (run.model[0], run.model[3])] == [False, False]
    assert run.context.high_precision == {}
    assert len(run.context.lr.rules) == is_alone, "several ranks make all changes or none"
    run.step()
    result = run.read_back("rollback", applied)
    assert result.ok is False
    assert "out of memory" in result.detail


def test_changes_that_another_rank_could_not_make_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollback_module._Chosen, "is_alone", property(lambda chosen: False))
    run, twin = trained(tmp_path / "a"), trained(tmp_path / "b")
    changing(run, Asks(Answer.DAMAGED), HOLD, BF16)
    changing(twin, Asks())
    assert run.context.lr.rules == {}
    assert run.context.high_precision == {}
    assert run.context.controls is not None
    assert twin.context.controls is not None
    assert same(run.context.controls.state_dict(), twin.context.controls.state_dict()), "the scales too"
    random = rng.snapshot()
    losses = run.run(5)
    rng.restore(random)
    assert losses == twin.run(5)


def test_a_change_that_cannot_be_taken_back_stops_several_ranks_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    run = trained(tmp_path)
    fails_after(monkeypatch, run.context.controls, "set_high_precision", times=9)
    if not is_alone:
        with pytest.raises(PartlyRestored, match="bf16_layers: not done on all ranks, and cannot be undone here"):
            changing(run, Asks(), BF16)
        return
    applied = changing(run, Asks(), BF16)
    run.step()
    assert "still changed: 3 in BF16 (RuntimeError: out of memory)" in run.read_back("rollback", applied).detail
