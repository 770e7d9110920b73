"""Saving, labelling, choosing and restoring checkpoints of one training process.

All of it runs on the training thread at a step boundary. A save that fails changes nothing and raises
`CheckpointError`, which the caller notes; training goes on. A restore verifies everything before it overwrites
anything.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fp8watch.checkpoints import contents, manifest, rotation
from fp8watch.checkpoints.config import Checkpoints
from fp8watch.checkpoints.files import HashingWriter, sync_directory, write_synced
from fp8watch.checkpoints.ledger import Ledger, Rollback, to_record
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.restore import RestoreReport, load_verified, put_back
from fp8watch.checkpoints.targets import resume_candidates, rollback_target
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
    ) -> None:
        """Makes the root directory and reads its ledger. Raises `CheckpointError` when it cannot be used."""
        self.config = config
        self.parts = parts
        self.root = Path(config.path).absolute()
        self._run = run
        self._attempt = attempt
        self._clock = clock
        self._every = config.every
        self.on_change: Callable[[CheckpointRecord], None] = lambda record: None
        """Called with every record that is new or has another label."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            rotation.clear_unfinished(self.root)
            self.ledger = Ledger(self.root)
        except OSError as error:
            raise CheckpointError(f"checkpoint directory {self.root} cannot be used: {error}") from error

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
        return self.ledger.notes

    def records(self) -> list[CheckpointRecord]:
        """Every checkpoint, in the order of saving."""
        return self.ledger.checkpoints

    def newest_usable(self, before_step: int | None = None) -> CheckpointRecord | None:
        """Where to resume (the newest saved that is not tainted), or with `before_step` where to roll back to."""
        if before_step is not None:
            return rollback_target(self.records(), before_step)
        return next(iter(resume_candidates(self.records())), None)

    def label(self, checkpoint: str, label: CheckpointLabel, reason: str = "") -> CheckpointRecord:
        """Set a label in the ledger; tainted is final. Raises `CheckpointError` for an unknown id."""
        before = self.ledger.find(checkpoint)
        record = self.ledger.label(checkpoint, label, reason)
        if record != before:
            self.on_change(record)
        return record

    def maybe_save(self, step: int) -> CheckpointRecord | None:
        """Save if the cadence asks for it after this step. Raises as `save`."""
        if self._every is None or step % self._every or step == 0:
            return None
        return self.save(step)

    def save(self, step: int, reason: str = "") -> CheckpointRecord:
        """Save the state after `step` updates; the record, labelled candidate.

        The state of this step and attempt is saved once: asked again, the first record comes back.
        Raises `CheckpointError`; what was there before is untouched then.
        """
        attempt = self._attempt()
        for record in self.records():
            if (record.run, record.attempt, record.step) == (self._run, attempt, step) and record.label != "tainted":
                return record
        name = self._free_name(step, attempt)
        folder = self.root / name
        temporary = self.root / f"{rotation.UNFINISHED}{name}.{os.getpid()}"
        parts = contents.capture(self.parts)
        try:
            temporary.mkdir()
            files = {}
            for file_name, content in parts.files.items():
                with open(temporary / file_name, "wb") as file:
                    writer = HashingWriter(file)
                    torch.save(content, writer)  # type: ignore[arg-type]
                    file.flush()
                    os.fsync(file.fileno())
                files[file_name] = writer.entry()
            written = contents.describe(
                self.parts,
                parts,
                files,
                checkpoint=name,
                run=self._run,
                attempt=attempt,
                step=step,
                time_unix=self._clock(),
            )
            write_synced(temporary / manifest.NAME, manifest.write(written))
            sync_directory(temporary)
            os.rename(temporary, folder)
            sync_directory(self.root)
        except Exception as error:  # torch.save reports a full disk as RuntimeError, a part may raise anything
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"checkpoint of step {step} could not be saved: {error}") from error
        record = to_record(written, folder, reason=reason)
        self.ledger.put(record)
        self.on_change(record)
        for gone in rotation.rotate(self.ledger, self.config.keep):
            self.on_change(gone)
        return record

    def restore(
        self, checkpoint: str, *, skip_batches: int = 0, allow_without_data: bool = False, fall_back: bool = True
    ) -> RestoreReport:
        """Bring the whole process back to a checkpoint, in place; what was restored.

        A damaged checkpoint is marked tainted, and the next older one of the same or a better label takes its
        place if `fall_back`. Raises `CheckpointError` with nothing overwritten: unknown, tainted or pending id,
        nothing intact left, parts that do not fit, or no data position without `allow_without_data`.
        """
        if skip_batches < 0:
            raise CheckpointError(f"skip_batches is {skip_batches}; it cannot be negative")
        record = self.ledger.find(checkpoint)
        if record.label in ("tainted", "pending"):
            raise CheckpointError(f"{checkpoint} is {record.label}: {record.reason or 'no reason given'}")
        refused: dict[str, str] = {}
        while True:
            try:
                loaded = load_verified(self.root / record.checkpoint)
                break
            except CheckpointError as error:
                logger.warning("checkpoint refused: %s", error)
                refused[record.checkpoint] = str(error)
                self._label_quietly(record.checkpoint, "tainted", f"damaged: {error}")
                older = rollback_target(self.records(), record.step, exclude=list(refused)) if fall_back else None
                if older is None:
                    raise CheckpointError("; ".join(refused.values()) + "; no older one is intact") from error
                record = older
        return put_back(
            self.parts, loaded, skip_batches=skip_batches, allow_without_data=allow_without_data, refused=refused
        )

    def note_rollback(self, report: RestoreReport, *, from_step: int, skip_batches: int) -> None:
        """Write a rollback into the ledger; later checkpoints belong to a timeline that is given up: tainted.

        Raises `CheckpointError` when it cannot be made durable (it holds in this process all the same).
        """
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
            )
        )
        if failures:
            raise failures[0]

    def _label_quietly(self, checkpoint: str, label: CheckpointLabel, reason: str) -> None:
        try:
            self.label(checkpoint, label, reason)
        except CheckpointError as error:
            logger.warning("%s", error)

    def _free_name(self, step: int, attempt: int) -> str:
        name = f"step-{step:08d}-attempt-{attempt}"
        suffix = 1
        while (self.root / name).exists():
            suffix += 1
            name = f"step-{step:08d}-attempt-{attempt}-{suffix}"
        return name
