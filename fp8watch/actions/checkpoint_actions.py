"""`checkpoint_now` and `checkpoint_cadence`: more checkpoints while the risk is up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.checkpoints import manifest
from fp8watch.checkpoints.files import verify
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.errors import ActionError, CheckpointError

NONE_GIVEN = "attach got no checkpoints="


class _CheckpointAction:
    def __init__(self, context: ActionContext) -> None:
        self._context = context

    def unavailable(self) -> str | None:
        """See `Action`."""
        return NONE_GIVEN if self._context.checkpoints is None else None

    def _manager(self) -> CheckpointManager:
        if self._context.checkpoints is None:
            raise ActionError(NONE_GIVEN)
        return self._context.checkpoints


class CheckpointNow(_CheckpointAction):
    """Save the present state."""

    name = "checkpoint_now"
    patience = 60
    """Boundaries at which it may still be pending; other actions show after a few."""

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`. Raises `CheckpointError` when the save fails."""
        record = self._manager().save(step, reason="asked for by an action")
        return Applied(step=step, params=params, expected={"checkpoint": record.checkpoint, "path": record.path})

    def read_back(self, applied: Applied) -> ReadBack:
        """The files on disk are those of the manifest, and the manifest is of this step.

        Each rank looks at what every rank needs; it takes until all ranks' parts are durable.
        """
        folder = Path(applied.expected["path"])
        manager = self._manager()
        is_others = not manager.is_writer and not (folder / manifest.NAME).exists()
        if applied.expected["checkpoint"] in manager.pending or is_others:
            return ReadBack(ok=None, detail="not all of it is durable yet")
        try:
            found = manifest.read(folder)
            verify(folder, found.files)
        except CheckpointError as error:
            return ReadBack(ok=False, detail=str(error))
        observed = {"checkpoint": found.checkpoint, "step": found.step}
        return ReadBack(ok=found.step == applied.step, observed=observed)

    def revert(self, applied: Applied) -> None:
        """Withdraw it while it is being saved, because another rank could not. One that is complete does no harm."""
        self._manager().withdraw(applied.expected["checkpoint"])


class CheckpointCadence(_CheckpointAction):
    """Save every `every` steps until it is reverted."""

    name = "checkpoint_cadence"

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`."""
        every = read.whole(params, "every", at_least=1)
        manager = self._manager()
        before = manager.every
        manager.set_every(every)
        return Applied(step=step, params=params, before={"every": before}, expected={"every": every})

    def read_back(self, applied: Applied) -> ReadBack:
        """The cadence in force."""
        every = self._manager().every
        return ReadBack(ok=every == applied.expected["every"], observed={"every": every})

    def revert(self, applied: Applied) -> None:
        """Back to the cadence before, unless a later action has set another."""
        manager = self._manager()
        if manager.every == applied.expected["every"]:
            manager.set_every(applied.before["every"])
