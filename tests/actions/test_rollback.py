from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import TinyRun, clone, everything, same

from fp8watch.actions import rollback as rollback_module
from fp8watch.checkpoints import Checkpoints
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.checkpoints.underway import Underway
from fp8watch.controller.checkpoints import Ledger as Verdicts
from fp8watch.errors import ActionError, CheckpointError

KINDS = ["sgd", "foreach", "fused", "tensor"]


def trained(root: Path, kind: str = "foreach", **options: object) -> TinyRun:
    run = TinyRun(root, kind=kind, every=10, **options)  # type: ignore[arg-type]
    run.run(20)
    return run


def first_checkpoint(run: TinyRun) -> str:
    assert run.manager is not None
    return run.manager.records()[0].checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_is_identical_to_the_first_time(tmp_path: Path, kind: str) -> None:
    run = trained(tmp_path, kind)
    first, losses = everything(run), run.losses[10:20]
    live = {name: value.data_ptr() for name, value in run.model.named_parameters()}
    moments = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    groups = list(run.optimizer.param_groups)

    applied = run.apply("rollback", checkpoint=first_checkpoint(run))

    assert applied.steps_replayed == 10
    assert run.global_step == 10
    assert run.attempt == 1
    assert run.data.samples == 80
    assert run.run(10) == losses
    second = everything(run)
    for part, value in first.items():
        assert same(value, second[part]), part
    # In place: the same tensors and group objects as before.
    assert {name: value.data_ptr() for name, value in run.model.named_parameters()} == live
    now = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert all(a is b for a, b in zip(moments, now, strict=True))
    assert all(a is b for a, b in zip(groups, run.optimizer.param_groups, strict=True))
    found = run.read_back("rollback", applied)
    assert found.ok is True
    assert found.observed["checkpoint"] == first_checkpoint(run)


def test_done_only_after_the_first_new_update(tmp_path: Path) -> None:
    run = trained(tmp_path)
    applied = run.apply("rollback", checkpoint=first_checkpoint(run))
    assert run.read_back("rollback", applied).ok is None
    run.step()
    assert run.read_back("rollback", applied).ok is True
    assert not run.optimizer._optimizer_step_pre_hooks


def test_parameters_changed_after_the_restore_fail_the_read_back(tmp_path: Path) -> None:
    run = trained(tmp_path)
    applied = run.apply("rollback", checkpoint=first_checkpoint(run))
    with torch.no_grad():
        next(run.model.parameters())[0, 0] += 1e-7
    run.step()
    found = run.read_back("rollback", applied)
    assert found.ok is False
    assert "restored parameters" in found.detail


def test_a_rewind_that_does_nothing_fails_the_read_back(tmp_path: Path) -> None:
    run = trained(tmp_path)
    run.context.rewind = lambda step: None
    applied = run.apply("rollback", checkpoint=first_checkpoint(run))
    run.step()
    found = run.read_back("rollback", applied)
    assert found.ok is False
    assert "step counter" in found.detail


def test_a_data_position_that_does_not_move_fails_the_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case: CKP-06
    run = trained(tmp_path)
    monkeypatch.setattr(run.data, "load_state_dict", lambda state, skip_batches=0: None)
    monkeypatch.setattr(type(run.data), "samples", 0, raising=False)
    applied = run.apply("rollback", checkpoint=first_checkpoint(run))
    run.data.samples = 0
    run.step()
    found = run.read_back("rollback", applied)
    assert found.ok is False
    assert "samples" in found.detail


def test_a_restore_that_copies_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    monkeypatch.setattr(run.model, "load_state_dict", lambda *args, **kwargs: None)
    with pytest.raises(PartlyRestored, match="checksum"):
        run.apply("rollback", checkpoint=first_checkpoint(run))
    assert run.context.halt_reason is not None  # mixed state must not be trained on
    assert "half-way" in run.context.halt_reason


def test_without_data_state_only_by_explicit_policy(tmp_path: Path) -> None:
    # case: CKP-06
    run = trained(tmp_path, with_data=False)
    before = everything(run)
    with pytest.raises(CheckpointError, match="data position"):
        run.apply("rollback", checkpoint=first_checkpoint(run))
    assert same(before, everything(run))
    assert run.global_step == 20
    applied = run.apply("rollback", checkpoint=first_checkpoint(run), allow_without_data=True)
    run.step()
    assert run.read_back("rollback", applied).ok is True
    assert applied.expected["data_restored"] is False


def test_a_loader_that_cannot_go_back_is_said_in_the_manifest_and_refused(tmp_path: Path) -> None:
    # case: CKP-06
    run = TinyRun(tmp_path, every=10)
    run.data.unavailable = "the loader can be iterated only once"
    run.run(20)
    assert run.manager is not None
    assert [record.has_data_position for record in run.manager.records()] == [False, False]
    with pytest.raises(CheckpointError, match="iterated only once"):
        run.apply("rollback", checkpoint=first_checkpoint(run))


def test_after_the_rollback_samples_continue_from_the_checkpoint_and_skip(tmp_path: Path) -> None:
    # case: CKP-06
    run = trained(tmp_path)
    seen: list[torch.Tensor] = []
    run.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    run.apply("rollback", checkpoint=first_checkpoint(run))
    run.run(3)
    plain, seen[:] = seen[:], []
    run.apply("rollback", checkpoint=first_checkpoint(run), skip_batches=1)
    run.step()
    assert torch.equal(seen[0], plain[1])
    assert run.data.samples == 80 + 2 * 8


def test_a_state_that_came_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    assert run.manager is not None
    record = run.manager.save(0)
    assert not run.optimizer.state
    run.run(5)
    losses = run.losses[:]
    run.apply("rollback", checkpoint=record.checkpoint)
    assert not run.optimizer.state
    assert run.run(5) == losses


def test_the_rollback_goes_to_before_the_onset(tmp_path: Path) -> None:
    # case: SPK-02
    run = TinyRun(tmp_path, every=5)
    run.run(20)
    assert run.manager is not None
    for record in run.manager.records():
        run.manager.label(record.checkpoint, "good", "20 healthy steps")
    applied = run.apply("rollback", onset_step=12)
    assert applied.expected["step"] == 10
    with pytest.raises(ActionError, match="before step 3"):
        run.apply("rollback", onset_step=3)


def test_what_became_durable_since_the_last_boundary_is_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rollback at the boundary after a save would find it or not, as the disk was quick or slow."""
    advance, is_durable = Underway.advance, [False]
    monkeypatch.setattr(Underway, "advance", lambda self, *args: advance(self, *args) if is_durable[0] else None)
    run = TinyRun(tmp_path, every=4)
    run.run(5)
    assert run.manager is not None
    assert run.manager.pending
    with pytest.raises(ActionError, match="no checkpoint from before step 5"):
        run.apply("rollback", onset_step=5)
    is_durable[0] = True
    assert run.apply("rollback", onset_step=5).expected["step"] == 4


def test_an_error_with_a_checkpoint_being_written_does_not_prevent_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path)
    assert run.manager is not None

    def fails() -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(run.manager, "poll", fails)
    run.apply("rollback", checkpoint=first_checkpoint(run))
    assert run.global_step == 10


def test_a_ledger_that_cannot_be_asked_refuses_the_rollback_with_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path)
    before = everything(run)
    assert run.manager is not None
    monkeypatch.setattr(run.manager, "was_made_before", lambda *args, **kwargs: 1 // 0)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        run.apply("rollback", checkpoint=first_checkpoint(run))
    assert all(same(value, everything(run)[part]) for part, value in before.items())


def test_what_is_in_force_stays_and_what_shall_change_changes(tmp_path: Path) -> None:
    run = trained(tmp_path)
    run.apply("hold_lr", factor=0.5)
    run.apply("bf16_layers", layers=["0"])
    applied = run.apply(
        "rollback",
        checkpoint=first_checkpoint(run),
        changes=[{"action": "tighten_clip", "params": {"max_norm": 0.05}}],
    )
    run.step()
    assert run.context.lr.effective_lr() == pytest.approx(0.5e-2)
    assert run.context.controls is not None
    assert run.context.controls.ran_high_precision(["0", "3"]) == [True, False]
    assert run.context.clip.last is not None
    assert run.context.clip.last.limit == 0.05
    assert run.read_back("rollback", applied).ok is True


def test_a_change_that_is_impossible_refuses_the_whole_rollback(tmp_path: Path) -> None:
    run = trained(tmp_path)
    before = everything(run)
    with pytest.raises(ActionError, match="halt"):
        run.apply("rollback", checkpoint=first_checkpoint(run), changes=[{"action": "halt"}])
    assert same(before, everything(run))


def test_a_change_that_is_a_no_op_fails_the_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    monkeypatch.setattr(run.context.controls, "set_high_precision", lambda *args, **kwargs: None)
    applied = run.apply(
        "rollback", checkpoint=first_checkpoint(run), changes=[{"action": "bf16_layers", "params": {"layers": ["0"]}}]
    )
    run.step()
    assert run.read_back("rollback", applied).ok is False


def test_a_rollback_is_written_into_the_ledger_and_what_it_left_is_tainted(tmp_path: Path) -> None:
    run = trained(tmp_path)
    assert run.manager is not None
    told: list[tuple[str, str]] = []
    run.manager.on_change = lambda record: told.append((record.checkpoint, record.label))
    run.apply("rollback", checkpoint=first_checkpoint(run), skip_batches=1)
    (entry,) = run.manager.ledger.rollbacks
    assert (entry.checkpoint, entry.from_step, entry.to_step, entry.attempt) == (first_checkpoint(run), 20, 10, 0)
    left = run.manager.records()[1]
    assert left.label == "tainted"
    assert told == [(left.checkpoint, "tainted")]
    with pytest.raises(CheckpointError, match="tainted"):
        run.manager.restore(left.checkpoint)


def test_a_damaged_target_gives_way_to_an_older_one(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, every=5)
    run.run(20)
    assert run.manager is not None
    records = run.manager.records()
    damaged = Path(records[1].path) / "optimizer.pt"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    applied = run.apply("rollback", checkpoint=records[1].checkpoint)
    assert applied.expected["checkpoint"] == records[0].checkpoint
    assert run.global_step == 5
    assert applied.steps_replayed == 15
    assert any("optimizer.pt" in note for note in run.notes)
    run.step()
    assert run.read_back("rollback", applied).ok is True


# case: STA-01
def test_scales_that_stay_where_they_were_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    assert run.context.controls is not None
    monkeypatch.setattr(run.context.controls, "load_state_dict", lambda state: None)
    with pytest.raises(PartlyRestored, match=r"FP8 state of 0\.forward\.\w+ was not restored"):
        run.apply("rollback", checkpoint=first_checkpoint(run))


# case: STA-06
def test_fp8_state_of_another_shape_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    run = trained(tmp_path)
    layer = run.model.get_submodule("0")
    layer.scaling_forward.amax_history = torch.zeros(9, 2)  # type: ignore[union-attr]
    before = everything(run)
    with pytest.raises(CheckpointError, match=r"amax_history: \(4, 2\) was saved, here it is \(9, 2\)"):
        run.apply("rollback", checkpoint=first_checkpoint(run))
    assert same(before, everything(run))


# case: CKP-21
def test_weights_that_took_a_detour_through_float16_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyRun(tmp_path, fp8=False)
    with torch.no_grad():
        next(run.model.parameters())[0, 0] = 1e6
    run.manager.save(0)  # type: ignore[union-attr]
    real = run.model.load_state_dict

    def detour(state: dict[str, torch.Tensor], strict: bool = True) -> object:
        return real({name: value.half().float() for name, value in state.items()}, strict=strict)

    monkeypatch.setattr(run.model, "load_state_dict", detour)
    with pytest.raises(PartlyRestored, match="checksum"):
        run.apply("rollback", checkpoint=first_checkpoint(run), allow_without_data=True)


# case: SPK-21
def test_spoilt_checkpoints_never_rotate_the_last_good_one_away(tmp_path: Path) -> None:
    """NaN since step 25, noticed by nobody until 60, three kept: what was good before is there, and nothing else is
    offered, although the controller finds every step healthy."""
    run = TinyRun(tmp_path, every=5)
    assert run.manager is not None
    run.manager.config = Checkpoints(tmp_path, every=5, keep=3)
    verdicts = Verdicts(healthy_steps=4)

    def train(steps: int) -> None:
        for _ in range(steps):
            run.run(1)
            for record in run.manager.records():
                verdicts.add(record)
            for record in verdicts.passed(run.global_step, ()):
                run.manager.label(record.checkpoint, record.label, record.reason)

    train(24)
    good = run.manager.records()[-1].checkpoint
    assert run.manager.records()[-1].label == "good"
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    train(36)
    spoilt = [record for record in run.manager.records() if record.step >= 25]
    assert {record.label for record in spoilt} == {"tainted"}
    assert {record.reason for record in spoilt} == {"parameters of rank 0 are not finite"}
    newest = run.manager.newest_usable()
    assert newest is not None
    assert newest.checkpoint == good
    applied = run.apply("rollback", onset_step=25)
    assert applied.expected["checkpoint"] == good
    assert all(bool(torch.isfinite(p).all()) for p in run.model.parameters())


def test_it_cannot_be_undone_and_needs_checkpoints(tmp_path: Path) -> None:
    run = trained(tmp_path)
    applied = run.apply("rollback", checkpoint=first_checkpoint(run))
    with pytest.raises(ActionError):
        run.actions["rollback"].revert(applied)
    assert TinyRun().actions["rollback"].unavailable() is not None
    assert rollback_module.CHANGES


def test_attached_checkpoints_do_not_disturb_training(tmp_path: Path) -> None:
    """Saving draws no random number and changes no bit of the run."""
    plain = TinyRun()
    plain.run(20)
    alone = everything(plain)
    random.seed(0)
    np.random.seed(0)
    before = (clone(random.getstate()), np.random.get_state()[1].tolist())
    saving = TinyRun(tmp_path, every=3)
    saving.run(20)
    assert saving.losses == plain.losses
    for part in ("model", "optimizer", "scheduler", "fp8", "torch"):
        assert same(alone[part], everything(saving)[part]), part
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
