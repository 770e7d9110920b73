"""`rollback`: the whole process back to a checkpoint from before the onset, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8watch.actions import params as read
from fp8watch.actions.base import Action, Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.errors import ActionError, CheckpointError

CHANGES = ("bf16_all", "bf16_layers", "hold_lr", "rewarm", "tighten_clip", "raise_margin")
"""What may be changed before the replay, so that it does not repeat what went wrong."""


class Rollback:
    """Parameters: `checkpoint` (id) or `onset_step`; `skip_batches`; `allow_without_data`; `changes`.

    What other actions have in force (LR factor, clip limit, BF16 modules, margin) stays in force. `changes`, a
    list of `{action, params}`, is applied right after the restore and read back with the rollback; what shall be
    reverted later is better sent as an action of its own at the same boundary.
    """

    name = "rollback"

    def __init__(self, context: ActionContext, actions: Callable[[], dict[str, Action]]) -> None:
        """`actions` gives the table that `changes` are looked up in."""
        self._context = context
        self._actions = actions
        self._first_update: _FirstUpdate | None = None
        self._changed: list[tuple[Action, Applied]] = []

    def unavailable(self) -> str | None:
        """See `Action`. The data position is asked for when it is needed: the loop may not have begun."""
        return None if self._context.checkpoints is not None else "attach got no checkpoints="

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`. Raises `CheckpointError` or `ActionError` with nothing changed.

        If restoring fails half-way the run is halted: mixed state must not be trained on.
        """
        manager = self._context.checkpoints
        if manager is None:
            raise ActionError("attach got no checkpoints=")
        skip_batches = read.whole(params, "skip_batches", 0)
        without_data = read.flag(params, "allow_without_data") or params.get("if_data_position_missing") == "accept"
        changes = self._changes(params)
        checkpoint = params.get("checkpoint")
        if checkpoint is None:
            target = manager.newest_usable(before_step=read.whole(params, "onset_step"))
            if target is None:
                raise ActionError(f"no checkpoint from before step {params['onset_step']}")
            checkpoint = target.checkpoint
        elif manager.ledger.find(str(checkpoint)).step > step:
            raise ActionError(f"{checkpoint} lies ahead of step {step}")
        try:
            report = manager.restore(str(checkpoint), skip_batches=skip_batches, allow_without_data=without_data)
        except PartlyRestored as error:
            self._context.halt_reason = f"rollback failed half-way: {error}"
            raise
        if self._first_update is not None:
            self._first_update.remove()
        self._first_update = _FirstUpdate(self._context)
        try:
            manager.note_rollback(report, from_step=step, skip_batches=skip_batches)
        except CheckpointError as error:
            self._context.note(f"rolled back, but not written down: {error}")
        self._context.rewind(report.step)
        for name, reason in report.refused.items():
            self._context.note(f"checkpoint {name} was refused: {reason}")
        self._changed = []
        applied_changes = [self._change(action, report.step, given) for action, given in changes]
        return Applied(
            step=step,
            params=params,
            before={"step": step},
            expected={
                "checkpoint": report.checkpoint,
                "step": report.step,
                "samples": report.samples,
                "data_restored": report.data_restored,
                "parameter_checksum": report.parameter_checksum,
                "refused": report.refused,
                "changes": applied_changes,
                "after_update": self._context.lr.updates,
                "after_skipped": int(self._context.skip.total),
            },
            steps_replayed=step - report.step,
        )

    def _changes(self, params: dict[str, Any]) -> list[tuple[Action, dict[str, Any]]]:
        """All changes, looked up before anything is touched."""
        table = self._actions()
        found: list[tuple[Action, dict[str, Any]]] = []
        for change in params.get("changes") or []:
            name, given = change.get("action"), dict(change.get("params") or {})
            if name not in CHANGES or name not in table:
                raise ActionError(f"changes: {name!r} is none of {', '.join(CHANGES)}")
            if reason := table[name].unavailable():
                raise ActionError(f"changes: {name}: {reason}")
            found.append((table[name], given))
        return found

    def _change(self, action: Action, step: int, params: dict[str, Any]) -> dict[str, Any]:
        try:
            applied = action.apply(step, params)
            self._changed.append((action, applied))
            return {"action": action.name, "params": applied.params}
        except ActionError as error:
            self._context.note(f"{action.name} was to change with the rollback and did not: {error}")
            return {"action": action.name, "error": str(error)}

    def read_back(self, applied: Applied) -> ReadBack:
        """Done only when the first new update began from the restored parameters and counters go on from there."""
        expected = applied.expected
        seen = self._first_update
        if seen is None or self._context.lr.updates <= expected["after_update"]:
            return ReadBack(ok=None, detail="no optimizer step has been made since")
        if seen.checksum is None:
            return ReadBack(ok=None, detail="the first optimizer step was not seen")
        samples = self._context.data.samples if self._context.data is not None else None
        observed: dict[str, Any] = {
            "checkpoint": expected["checkpoint"],
            "step": self._context.step(),
            "samples": samples,
            "learning_rate": self._context.lr.effective_lr(),
        }
        problems = []
        if seen.checksum != expected["parameter_checksum"]:
            problems.append("the first update did not begin from the restored parameters")
        steps_since = self._context.step() - expected["step"]
        updates = self._context.lr.updates - expected["after_update"]
        skipped = int(self._context.skip.total) - expected["after_skipped"]
        if not 1 <= steps_since <= updates + skipped:
            problems.append(f"the step counter is {self._context.step()}, it was to go on from {expected['step']}")
        if expected["data_restored"] and (samples is None or samples <= expected["samples"]):
            problems.append(f"samples are {samples}, they were to go on from {expected['samples']}")
        found = [(action, action.read_back(change)) for action, change in self._changed]
        if any(result.ok is None for _, result in found) and not problems:
            return ReadBack(ok=None, observed=observed, detail="a change is not visible yet")
        problems += [f"{action.name}: {result.detail}" for action, result in found if result.ok is False]
        failed = [change for change in expected["changes"] if "error" in change]
        problems += [f"{change['action']} was not changed: {change['error']}" for change in failed]
        return ReadBack(ok=not problems, observed=observed, detail="; ".join(problems))

    def revert(self, applied: Applied) -> None:
        """The timeline that was left is gone."""
        raise ActionError("a rollback cannot be undone")


class _FirstUpdate:
    """Takes the parameters' checksum right before the first update after a restore."""

    def __init__(self, context: ActionContext) -> None:
        self.checksum: str | None = None
        self._model = context.model
        self._handle = context.optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.checksum = parameter_checksum(self._model)
        self.remove()

    def remove(self) -> None:
        """Leave no hook behind."""
        self._handle.remove()
