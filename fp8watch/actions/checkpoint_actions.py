"""`checkpoint_now` and `checkpoint_cadence`: more checkpoints while the risk is high."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.in_force import InForce
from fp8watch.actions.undo import Undo, all_or_nothing
from fp8watch.checkpoints import manifest
from fp8watch.checkpoints.aside import later
from fp8watch.checkpoints.files import verify
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.manifest import FileEntry
from fp8watch.errors import ActionError, CheckpointError

PATIENCE = 60
NO_CHECKPOINTS = "attach got no checkpoints="


class _CheckpointAction:
    def __init__(self, context: ActionContext) -> None:
        self._context = context

    def unavailable(self) -> str | None:
        """See `Action`."""
        return NO_CHECKPOINTS if self._context.checkpoints is None else None

    def _manager(self) -> CheckpointManager:
        if self._context.checkpoints is None:
            raise ActionError(NO_CHECKPOINTS)
        return self._context.checkpoints


class CheckpointNow(_CheckpointAction):
    """Saves the current state."""

    name = "checkpoint_now"

    def __init__(self, context: ActionContext) -> None:
        super().__init__(context)
        self._checks: dict[str, Future[CheckpointError | None]] = {}
        """Checksum comparisons that are running or not yet read, by checkpoint. A result is the error, or None."""

    @property
    def patience(self) -> int:
        """Number of boundaries for which the read-back may stay pending. Unlimited while a save or a comparison of
        files is running, because both end by themselves."""
        manager = self._context.checkpoints
        is_busy = any(not check.done() for check in self._checks.values()) or bool(manager and manager.pending)
        return sys.maxsize if is_busy else PATIENCE

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`. Raises `CheckpointError` when the save fails."""
        manager = self._manager()
        record = manager.save(step, reason="asked for by an action")
        undo.add(f"{record.checkpoint}, which is being saved", lambda: manager.withdraw(record.checkpoint))
        return Applied(step=step, params=params, expected={"checkpoint": record.checkpoint, "path": record.path})

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the files on disk match the manifest, and the manifest is of this step.

        Pending until the parts of all ranks are durable, then until a thread has checked this rank's share of the
        files.
        """
        folder = Path(applied.expected["path"])
        manager = self._manager()
        is_others = not manager.is_writer and not (folder / manifest.NAME).exists()
        if applied.expected["checkpoint"] in manager.pending or is_others:
            return ReadBack(ok=None, detail="not all of it is durable yet")
        try:
            found = manifest.read(folder)
            problem = self._problem_of(folder, manifest.share_of(found, manager.rank))
        except CheckpointError as error:
            return ReadBack(ok=False, detail=str(error))
        if isinstance(problem, CheckpointError):
            return ReadBack(ok=False, detail=str(problem))
        if problem is not None:
            return ReadBack(ok=None, detail=problem)
        observed = {"checkpoint": found.checkpoint, "step": found.step}
        return ReadBack(ok=found.step == applied.step, observed=observed)

    def _problem_of(self, folder: Path, files: dict[str, FileEntry]) -> CheckpointError | str | None:
        """The error found in the files, or None. A string: they are still being checked."""
        check = self._checks.get(folder.name)
        if check is None:
            check = self._checks[folder.name] = later(lambda: _compare(folder, files))
        if not check.done():
            return "its files are being checked"
        return self._checks.pop(folder.name).result()

    def revert(self, applied: Applied) -> None:
        """Cancel a save in progress, because another rank failed. A complete checkpoint does no harm and stays."""
        self._manager().withdraw(applied.expected["checkpoint"])

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether the checkpoint is no longer being saved."""
        is_gone = applied.expected["checkpoint"] not in self._manager().pending
        return ReadBack(ok=is_gone, detail="" if is_gone else "it is still being saved")


def _compare(folder: Path, files: dict[str, FileEntry]) -> CheckpointError | None:
    try:
        verify(folder, files, max_threads=1)  # training needs the cores
    except CheckpointError as error:
        return error
    return None


class CheckpointCadence(_CheckpointAction):
    """Saves every `every` steps until reverted. If several are in force, the latest applies."""

    name = "checkpoint_cadence"

    def __init__(self, context: ActionContext) -> None:
        super().__init__(context)
        self._cadences: InForce[int | None] = InForce()
        self._users_own: int | None = None

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        every = read.whole(params, "every", at_least=1)
        manager = self._manager()
        before = manager.every
        if not self._cadences:
            self._users_own = before
        undo.add("the cadence of checkpoints", lambda: manager.set_every(before))
        undo.add("the cadences in force", self._cadences.restorer())
        number = self._cadences.add(every)
        manager.set_every(every)
        return Applied(step=step, params=params, before={"every": before}, expected={"every": every, "number": number})

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the cadence is in force."""
        every = self._manager().every
        return ReadBack(ok=every == applied.expected["every"], observed={"every": every})

    def revert(self, applied: Applied) -> None:
        """Remove this cadence. The latest of the others applies, or the user's own if there is none."""
        if self._cadences.remove(applied.expected["number"]):
            self._manager().set_every(self._cadences.latest(self._users_own))

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether this cadence is gone and the remaining one applies."""
        every, wanted = self._manager().every, self._cadences.latest(self._users_own)
        is_back = every == wanted and applied.expected["number"] not in self._cadences
        return ReadBack(ok=is_back, observed={"every": every}, detail="" if is_back else f"the cadence is {every}")
