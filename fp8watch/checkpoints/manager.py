"""Saving, labelling, choosing and restoring checkpoints of one training process, or of one rank of several.

All of it runs on the training thread at a step boundary. A save that fails changes nothing and raises
`CheckpointError`, which the caller notes; training goes on. A restore verifies everything before it overwrites
anything.

Of several ranks, which share the directory, the first alone writes the ledger and removes folders. All ranks save at
the same steps; what they restore is settled between them (`fp8watch.actions.rollback`, `fp8watch.training.resume`).
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
    """The checkpoints of one run under one root directory."""

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
        """Makes the root directory and reads its ledger. `together`: how ranks settle that all of them begin a save.

        Raises `CheckpointError` when it cannot be used or another run uses it, `Unsupported` when no checkpoint could
        hold this model or optimizer.
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
        self._doomed = rotation.Doomed()
        self.on_change: Callable[[CheckpointRecord], None] = lambda record: None
        """Called with every record that is new or has another label."""
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
        """Steps between two checkpoints now in force; None: only on demand."""
        return self._every

    def set_every(self, every: int | None) -> None:
        """Change the cadence until it is changed again."""
        self._every = every

    @property
    def notes(self) -> list[str]:
        """What was found amiss on opening, for the person who trains."""
        found = list(self.ledger.notes)
        if self._owner is not None and self._owner.note:
            found.append(self._owner.note)
        if self.is_writer and self.config.save is None:  # of a user's own format nothing is known
            layout = layout_of(self.parts.model, self.parts.optimizer, self.world_size)
            place = Place(world_size=self.world_size, layout=layout)
            note = space.note(self.root, self.config, self.parts, place, held=len(self.ledger.checkpoints))
            found += [note] if note is not None else []
        return found

    def records(self) -> list[CheckpointRecord]:
        """Every checkpoint, in the order of saving."""
        self.ledger.refresh()
        return self.ledger.checkpoints

    def newest_usable(self, before_step: int | None = None) -> CheckpointRecord | None:
        """Where to resume (the newest saved that is not tainted), or with `before_step` where to roll back to."""
        if before_step is not None:
            return rollback_target(self.records(), before_step)
        return next(iter(resume_candidates(self.records())), None)

    def resume_target(self) -> CheckpointRecord | None:
        """Where a start goes on, noted as being tried: one whose loading has ended the process twice is given up."""
        while (record := self.newest_usable()) is not None:
            if not self.is_writer or self._trial.begin(record.checkpoint):
                return record
            self.refuse(record.checkpoint, f"{record.checkpoint}: {MAX_TRIALS} starts from it made no step")
        return None

    def label(self, checkpoint: str, label: CheckpointLabel, reason: str = "") -> CheckpointRecord:
        """Set a label in the ledger; tainted is final. Raises `CheckpointError` for an unknown id."""
        before = self.ledger.find(checkpoint)
        if before.label == "pending" and label in ("candidate", "good"):
            return before  # nobody but the one who saves knows when it is durable
        record = self.ledger.label(checkpoint, label, reason)
        if record != before and self.is_writer:
            self.on_change(record)
        return record

    # Saving

    def maybe_save(self, step: int) -> CheckpointRecord | None:
        """Save if the cadence asks for it after this step. Raises as `save`."""
        if self._every is None or step % self._every or step == 0:
            return None
        return self.save(step)

    def save(self, step: int, reason: str = "") -> CheckpointRecord:
        """Save the state after `step` updates; the record, labelled candidate, or pending until all is durable.

        The state of this step and attempt is saved once: asked again, the first record comes back.
        Raises `CheckpointError`; what was there before is untouched then.
        """
        attempt = self._attempt()
        ask = self._beginning.question(attempt, step)
        known = self._saved_before(attempt, step)
        if known is not None:
            ask(f"{known.checkpoint} is saved already")  # another rank may think otherwise
            return known
        name = rotation.free_name(self.root, step, attempt)
        layout = layout_of(self.parts.model, self.parts.optimizer, self.world_size)
        suffix = os.getpid() if layout == "whole" else "ranks"
        saving = Underway(
            self.root / f"{rotation.UNFINISHED}{name}.{suffix}", self.root / name, step=step, attempt=attempt,
            reason=reason, place=Place(rank=self.rank, world_size=self.world_size, layout=layout),
            started=self._monotonic(),
        )  # fmt: skip
        if saving.folder in self._doomed:
            ask(given_up := f"checkpoint of step {step} was given up a moment ago")
            raise CheckpointError(given_up)
        try:
            saving.begin(self.parts, self._storage, ask)
        except CheckpointError:
            self._doom(saving)
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
            return self._newest  # not in the ledger of a rank that only reads it, as long as it is pending
        for record in self.records():
            if (record.run, record.attempt, record.step) == (self._run, attempt, step) and record.label != "tainted":
                return record
        return None

    @property
    def pending(self) -> list[str]:
        """Checkpoints that are being saved."""
        return [saving.final.name for saving in self._underway]

    def poll(self) -> None:
        """At each boundary: go on with what is being saved. Raises `CheckpointError` when one never will be."""
        self._trial.passed()
        self._doomed.poll()
        for saving in self._underway[:]:
            self._advance(saving)

    def withdraw(self, checkpoint: str) -> None:
        """Give up one that is being saved; nothing for any other."""
        if self._newest is not None and self._newest.checkpoint == checkpoint:
            self._newest = None
        for saving in [saving for saving in self._underway if saving.final.name == checkpoint]:
            self._underway.remove(saving)
            self._doom(saving)
            self._forget(checkpoint, "another rank could not save its part")

    def close(self, seconds: float) -> None:
        """Wait, within limits, for what is being saved. A run that ends in order has not died of what it loaded.

        Nothing is saved afterwards: another run may write into the directory."""
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
                logger.warning("%s", error)
            if not self._underway or time.monotonic() >= deadline:
                return
            time.sleep(0.02)

    def _advance(self, saving: Underway) -> CheckpointRecord | None:
        try:
            written = saving.advance(self._monotonic(), self._clock(), self._storage.name, self._run)
        except CheckpointError as error:
            self._underway.remove(saving)
            self._doom(saving)
            self._forget(saving.final.name, str(error))
            raise
        if saving.part is not None and not self.is_writer:
            self._underway.remove(saving)  # the first rank does the rest
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

    def _doom(self, saving: Underway) -> None:
        if self.is_writer:
            self._doomed.add(saving.folder)

    def _forget(self, checkpoint: str, why: str) -> None:
        """A pending checkpoint that never will be one."""
        known = next((record for record in self.ledger.checkpoints if record.checkpoint == checkpoint), None)
        if known is None or not self.is_writer:
            return
        try:
            self.ledger.drop(checkpoint)
        except CheckpointError as error:
            logger.warning("%s", error)
        self.on_change(msgspec.structs.replace(known, label="tainted", reason=why, path=""))

    # Restoring

    def load(self, checkpoint: str, *, allow_without_data: bool, is_quick: bool = False) -> Loaded:
        """Read and check one for this rank; nothing is overwritten. `is_quick`: training waits for it.

        Raises `CheckpointError` when it is damaged, `Unfit` when it is sound and cannot be restored here.
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
        """It is damaged: nobody shall go back to it."""
        logger.warning("checkpoint refused: %s", why)
        try:
            self.label(checkpoint, "tainted", f"damaged: {why}")
        except CheckpointError as error:
            logger.warning("%s", error)

    def target(self, checkpoint: str) -> CheckpointRecord:
        """The record of a target. Raises `CheckpointError` for an unknown, tainted or pending id."""
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
        """Bring this process alone back to a checkpoint, in place; what was restored.

        A damaged checkpoint is marked tainted, and if `fall_back` another takes its place: the next older one of the
        same or a better label, or what `following` (damaged, all refused so far) chooses. Raises `CheckpointError`
        with nothing overwritten: unknown, tainted or pending id, nothing intact left, parts that do not fit, or no
        data position without `allow_without_data`.
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
        """What takes the place of one that is damaged: an older one, or with the onset any from before it."""
        before = record.step if onset_step is None else max(record.step, onset_step)
        return rollback_target(self.records(), before, exclude=list(refused))

    def was_made_before(self, checkpoint: str, *, skip_batches: int, setting: str) -> bool:
        """Whether the run has gone back to it already, to replay the same batches under the same setting."""
        return any(
            (done.checkpoint, done.skip_batches, done.setting) == (checkpoint, skip_batches, setting)
            for done in self.ledger.rollbacks
        )

    def note_rollback(self, report: RestoreReport, *, from_step: int, skip_batches: int, setting: str = "") -> None:
        """Write a rollback into the ledger; later checkpoints belong to a timeline that is given up: tainted.

        Raises `CheckpointError` when it cannot be made durable (it holds in this process all the same).
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
