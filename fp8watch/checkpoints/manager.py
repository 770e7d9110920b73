"""Saves, labels, selects and restores the checkpoints of a training process, or of one of several ranks.

Everything runs on the training thread at a step boundary. A failed save changes nothing and raises `CheckpointError`;
the caller reports it and training continues. A restore verifies everything before it overwrites anything.

Several ranks share the directory. Only rank 0 writes the ledger and removes folders. All ranks save at the same steps.
Which checkpoint they restore is agreed in `fp8watch.actions.rollback` and `fp8watch.training.resume`.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from fp8watch.checkpoints import rotation, space
from fp8watch.checkpoints.config import Checkpoints
from fp8watch.checkpoints.ledger import Ledger, Rollback, to_record
from fp8watch.checkpoints.owner import Owner
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place, Unsupported, layout_of, unsupported
from fp8watch.checkpoints.restore import Loaded, RestoreReport, Unfit, check, load_verified, put_back
from fp8watch.checkpoints.storage import storage_of
from fp8watch.checkpoints.targets import resume_candidates, rollback_target
from fp8watch.checkpoints.together import Beginning, Together
from fp8watch.checkpoints.trial import MAX_TRIALS, Trial
from fp8watch.checkpoints.underway import Underway
from fp8watch.errors import CheckpointError
from fp8watch.records import CheckpointLabel, CheckpointRecord

logger = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of one run in one root directory."""

    def __init__(
        self,
        config: Checkpoints,
        parts: TrainingParts,
        *,
        run: str,
        attempt: Callable[[], int],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        rank: int = 0,
        world_size: int = 1,
        together: Together | None = None,
    ) -> None:
        """Creates the root directory and reads its ledger. `together`: how ranks agree that all of them begin a save.

        Raises `CheckpointError` if the directory cannot be used or another run uses it, and `Unsupported` if no
        checkpoint can hold this model or optimizer.
        """
        self.config = config
        self.parts = parts
        self.root = Path(config.path).absolute()
        self.rank, self.world_size = rank, world_size
        self._run = run
        self._attempt = attempt
        self._clock, self._monotonic = clock, monotonic
        self._every = config.every
        self._storage = storage_of(config)
        if reason := (None if config.save is not None else unsupported(parts.model, parts.optimizer, world_size)):
            raise Unsupported(reason)
        self._beginning = Beginning(self._storage, together, world_size)
        self._trial = Trial(self.root)
        self._underway: list[Underway] = []
        self._newest: CheckpointRecord | None = None
        self._discarded = rotation.DiscardedFolders()
        self.on_change: Callable[[CheckpointRecord], None] = lambda record: None
        """Called with every record that is new or has a new label."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._owner = Owner(self.root, run) if self.is_writer else None
            if self._owner is not None:
                weakref.finalize(self, self._owner.release)
                rotation.clear_unfinished(self.root)
            self.ledger = Ledger(self.root, is_writer=self.is_writer)
        except OSError as error:
            raise CheckpointError(f"checkpoint directory {self.root} cannot be used: {error}") from error

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the ledger."""
        return self.rank == 0

    @property
    def every(self) -> int | None:
        """Current number of steps between two checkpoints; None: only on demand."""
        return self._every

    def set_every(self, every: int | None) -> None:
        """Change the number of steps between checkpoints, until the next change."""
        self._every = every

    @property
    def notes(self) -> list[str]:
        """Problems found on opening, for the user."""
        found = list(self.ledger.notes)
        if self._owner is not None and self._owner.note:
            found.append(self._owner.note)
        if self.is_writer and self.config.save is None:  # the size of a user's own format is unknown
            layout = layout_of(self.parts.model, self.parts.optimizer, self.world_size)
            place = Place(world_size=self.world_size, layout=layout)
            note = space.note(self.root, self.config, self.parts, place, held=len(self.ledger.checkpoints))
            found += [note] if note is not None else []
        return found

    def records(self) -> list[CheckpointRecord]:
        """Every checkpoint in the order of saving."""
        self.ledger.refresh()
        return self.ledger.checkpoints

    def newest_usable(self, before_step: int | None = None) -> CheckpointRecord | None:
        """The checkpoint to resume from (the newest saved that is not tainted), or with `before_step` to roll back
        to."""
        if before_step is not None:
            return rollback_target(self.records(), before_step)
        return next(iter(resume_candidates(self.records())), None)

    def resume_target(self) -> CheckpointRecord | None:
        """The checkpoint that a start resumes from, recorded as a trial. One is skipped after `MAX_TRIALS` starts
        without a step."""
        while (record := self.newest_usable()) is not None:
            if not self.is_writer or self._trial.begin(record.checkpoint):
                return record
            why = f"{MAX_TRIALS} starts from it ended before their first step, so it is not tried again"
            self.refuse(record.checkpoint, f"{record.checkpoint}: {why}")
        return None

    def label(self, checkpoint: str, label: CheckpointLabel, reason: str = "") -> CheckpointRecord:
        """Set a label in the ledger. Tainted is final. Raises `CheckpointError` for an unknown ID."""
        before = self.ledger.find(checkpoint)
        if before.label == "pending" and label in ("candidate", "good"):
            return before  # only the save itself knows when it is durable
        record = self.ledger.label(checkpoint, label, reason)
        if record != before and self.is_writer:
            self.on_change(record)
        return record

    # Saving

    def maybe_save(self, step: int) -> CheckpointRecord | None:
        """Save if `every` says so after this step. Raises like `save`."""
        if self._every is None or step % self._every or step == 0:
            return None
        return self.save(step)

    def save(self, step: int, reason: str = "") -> CheckpointRecord:
        """Save the state after `step` updates. Returns the record, labelled candidate, or pending until everything is
        durable.

        The state of a step and attempt is saved once: a second call returns the first record. Raises `CheckpointError`;
        earlier checkpoints are untouched then.
        """
        attempt = self._attempt()
        ask = self._beginning.question(attempt, step)
        known = self._saved_before(attempt, step)
        if known is not None:
            ask(f"{known.checkpoint} is saved already")  # another rank may not have it
            return known
        name = rotation.free_name(self.root, step, attempt)
        layout = layout_of(self.parts.model, self.parts.optimizer, self.world_size)
        suffix = os.getpid() if layout == "whole" else "ranks"
        saving = Underway(
            self.root / f"{rotation.UNFINISHED}{name}.{suffix}", self.root / name, step=step, attempt=attempt,
            reason=reason, place=Place(rank=self.rank, world_size=self.world_size, layout=layout),
            started=self._monotonic(),
        )  # fmt: skip
        if saving.folder in self._discarded:
            ask(given_up := f"checkpoint of step {step} was given up a moment ago")
            raise CheckpointError(given_up)
        try:
            saving.begin(self.parts, self._storage, ask, self._beginning.algorithm)
        except CheckpointError:
            self._discard(saving)
            raise
        self._underway.append(saving)
        finished = self._advance(saving)
        if finished is not None:
            return finished
        self._newest = pending = CheckpointRecord(
            run=self._run, attempt=attempt, checkpoint=name, step=step, path=str(saving.final), label="pending",
            reason=reason, time_unix=self._clock(),
        )  # fmt: skip
        if self.is_writer:
            self.ledger.put(pending)
            self.on_change(pending)
            self._newest = None
        return pending

    def _saved_before(self, attempt: int, step: int) -> CheckpointRecord | None:
        if self._newest is not None and (self._newest.attempt, self._newest.step) == (attempt, step):
            return self._newest  # while pending it is not in the ledger of a rank that only reads
        for record in self.records():
            if (record.run, record.attempt, record.step) == (self._run, attempt, step) and record.label != "tainted":
                return record
        return None

    @property
    def pending(self) -> list[str]:
        """IDs of checkpoints being saved."""
        return [saving.final.name for saving in self._underway]

    def poll(self) -> None:
        """Continue the saves in progress. Called at each step boundary. Raises `CheckpointError` when one has
        failed."""
        self._trial.passed()
        self._discarded.poll()
        for saving in self._underway[:]:
            self._advance(saving)

    def withdraw(self, checkpoint: str) -> None:
        """Discard a checkpoint being saved. Does nothing for others."""
        if self._newest is not None and self._newest.checkpoint == checkpoint:
            self._newest = None
        for saving in [saving for saving in self._underway if saving.final.name == checkpoint]:
            self._underway.remove(saving)
            self._discard(saving)
            self._forget(checkpoint, "another rank could not save its part")

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the saves in progress. An orderly end also clears the trial of the resumed
        checkpoint.

        Releases the directory: afterwards another run may use it, and nothing more is saved.
        """
        try:
            self._finish(seconds)
        finally:
            if self._owner is not None:
                self._owner.release()

    def _finish(self, seconds: float) -> None:
        self._trial.passed()
        deadline = time.monotonic() + seconds
        while self._underway:
            try:
                self.poll()
            except CheckpointError as error:
                logger.warning("fp8watch: %s", error)
            if not self._underway or time.monotonic() >= deadline:
                return
            time.sleep(0.02)

    def _advance(self, saving: Underway) -> CheckpointRecord | None:
        try:
            written = saving.advance(self._monotonic(), self._clock(), self._storage.name, self._run)
        except CheckpointError as error:
            self._underway.remove(saving)
            self._discard(saving)
            self._forget(saving.final.name, str(error))
            raise
        if saving.part is not None and not self.is_writer:
            self._underway.remove(saving)  # rank 0 does the rest
        if written is None:
            return None
        self._underway.remove(saving)
        record = to_record(written, saving.final, reason=saving.reason)
        known = {item.checkpoint: item for item in self.ledger.checkpoints}.get(record.checkpoint)
        if known is not None and known.label == "tainted":
            record = msgspec.structs.replace(record, label="tainted", reason=known.reason)
        self.ledger.put(record)
        self.on_change(record)
        for gone in rotation.rotate(self.ledger, self.config.keep):
            self.on_change(gone)
        return record

    def _discard(self, saving: Underway) -> None:
        if self.is_writer:
            self._discarded.add(saving.folder)

    def _forget(self, checkpoint: str, why: str) -> None:
        """Drop a pending checkpoint that has failed."""
        known = next((record for record in self.ledger.checkpoints if record.checkpoint == checkpoint), None)
        if known is None or not self.is_writer:
            return
        try:
            self.ledger.drop(checkpoint)
        except CheckpointError as error:
            logger.warning("fp8watch: %s", error)
        self.on_change(msgspec.structs.replace(known, label="tainted", reason=why, path=""))

    # Restoring

    def load(self, checkpoint: str, *, allow_without_data: bool, is_quick: bool = False) -> Loaded:
        """Read and check a checkpoint for this rank. Overwrites nothing. `is_quick`: training waits for it.

        Raises `CheckpointError` when it is damaged, `Unfit` when it is intact but cannot be restored here.
        """
        folder = self.root / checkpoint
        loaded = load_verified(
            folder, self.parts, self._storage, rank=self.rank, world_size=self.world_size, is_quick=is_quick
        )
        check(self.parts, loaded, allow_without_data=allow_without_data)
        return loaded

    def put_back(self, loaded: Loaded, *, skip_batches: int, refused: dict[str, str]) -> RestoreReport:
        """Overwrite the live state. Raises `CheckpointError` before the first change, `PartlyRestored` after it."""
        return put_back(self.parts, loaded, skip_batches=skip_batches, refused=refused)

    def refuse(self, checkpoint: str, why: str) -> None:
        """Mark a damaged checkpoint as tainted."""
        logger.warning("fp8watch: checkpoint refused: %s", why)
        try:
            self.label(checkpoint, "tainted", f"damaged: {why}")
        except CheckpointError as error:
            logger.warning("fp8watch: %s", error)

    def target(self, checkpoint: str) -> CheckpointRecord:
        """The record of a target. Raises `CheckpointError` for an unknown, tainted or pending ID."""
        self.ledger.refresh()
        record = self.ledger.find(checkpoint)
        if record.label in ("tainted", "pending"):
            raise CheckpointError(f"{checkpoint} is {record.label}: {record.reason or 'no reason given'}")
        return record

    def restore(
        self,
        checkpoint: str,
        *,
        skip_batches: int = 0,
        allow_without_data: bool = False,
        fall_back: bool = True,
        following: Callable[[CheckpointRecord, dict[str, str]], CheckpointRecord | None] | None = None,
        is_quick: bool = False,
    ) -> RestoreReport:
        """Restore a checkpoint in place, in this process only. Returns what was restored.

        A damaged checkpoint is marked tainted. With `fall_back` another replaces it: the choice of `following` (damaged
        record, all refused so far), by default of `next_best`. Raises `CheckpointError` with nothing overwritten:
        unknown, tainted or pending ID, nothing intact left, parts that do not fit, or no data position without
        `allow_without_data`.
        """
        if skip_batches < 0:
            raise CheckpointError(f"skip_batches is {skip_batches}; it cannot be negative")
        record: CheckpointRecord | None = self.target(checkpoint)
        refused: dict[str, str] = {}
        while record is not None:
            try:
                loaded = self.load(record.checkpoint, allow_without_data=allow_without_data, is_quick=is_quick)
            except Unfit:
                raise
            except CheckpointError as error:
                refused[record.checkpoint] = str(error)
                self.refuse(record.checkpoint, str(error))
                record = (following or self.next_best)(record, refused) if fall_back else None
            else:
                return self.put_back(loaded, skip_batches=skip_batches, refused=refused)
        raise CheckpointError("; ".join(refused.values()) + "; no older one is intact")

    def next_best(
        self, record: CheckpointRecord, refused: dict[str, str], *, onset_step: int | None = None
    ) -> CheckpointRecord | None:
        """The replacement of a damaged checkpoint: the newest good one, else the newest candidate, among those older
        than it or, with `onset_step`, from before the onset."""
        before = record.step if onset_step is None else max(record.step, onset_step)
        return rollback_target(self.records(), before, exclude=list(refused))

    def was_made_before(self, checkpoint: str, *, skip_batches: int, setting: str) -> bool:
        """Whether the run has already rolled back to it with the same batches and settings."""
        return any(
            (done.checkpoint, done.skip_batches, done.setting) == (checkpoint, skip_batches, setting)
            for done in self.ledger.rollbacks
        )

    def note_rollback(self, report: RestoreReport, *, from_step: int, skip_batches: int, setting: str = "") -> None:
        """Add a rollback to the ledger and taint the later checkpoints, whose timeline it abandoned.

        Raises `CheckpointError` if it is not durable; this process keeps it all the same.
        """
        if not self.is_writer:
            return
        failures = []
        for record in self.records():
            if record.step > report.step and record.label != "tainted":
                reason = f"its timeline was given up by the rollback to {report.checkpoint}"
                try:
                    self.label(record.checkpoint, "tainted", reason)
                except CheckpointError as error:
                    failures.append(error)
        self.ledger.add_rollback(
            Rollback(
                checkpoint=report.checkpoint,
                from_step=from_step,
                to_step=report.step,
                attempt=self._attempt(),
                skip_batches=skip_batches,
                time_unix=self._clock(),
                setting=setting,
            )
        )
        if failures:
            raise failures[0]
