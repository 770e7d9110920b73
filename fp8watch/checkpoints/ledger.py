"""The ledger: what is known about each checkpoint after it was saved.

It is stored beside the checkpoint folders, so that a new label never changes a finished checkpoint, and is replaced
atomically. Records are in the order of saving. Rank 0 writes the ledger; other ranks read it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from fp8watch.atomic_file import replace_file
from fp8watch.checkpoints import manifest as manifests
from fp8watch.errors import CheckpointError
from fp8watch.records import CheckpointLabel, CheckpointRecord

logger = logging.getLogger(__name__)
NAME = "ledger.json"
COPY = ".ledger-copy.json"
"""A second copy, because labels are stored nowhere else."""
LOST = "labels are lost, folders are taken as candidates"


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """A completed rollback."""

    checkpoint: str
    from_step: int
    to_step: int
    attempt: int
    """The attempt that it ended."""
    skip_batches: int
    time_unix: float
    setting: str = ""
    """Settings of the replay: precision, limits, learning rate, margin."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `ledger.json`."""

    version: int = 1
    checkpoints: list[CheckpointRecord] = []
    rollbacks: list[Rollback] = []


class Ledger:
    """Labels of the checkpoints under one root."""

    def __init__(self, root: Path, *, is_writer: bool = True) -> None:
        """Without `is_writer` another rank writes the ledger, and `refresh` reads it."""
        self._root = root
        self._is_writer = is_writer
        self._contents = Contents()
        self.notes: list[str] = []
        """Problems found on opening, for the owner to say."""
        self._open()

    def refresh(self) -> None:
        """Read the ledger again. Does nothing on the rank that writes it."""
        if not self._is_writer:
            self.notes = []
            self._open()

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        """All records in the order of saving."""
        return list(self._contents.checkpoints)

    @property
    def rollbacks(self) -> list[Rollback]:
        """All rollbacks, oldest first."""
        return list(self._contents.rollbacks)

    def find(self, checkpoint: str) -> CheckpointRecord:
        """The record of an ID. Raises `CheckpointError`."""
        for record in self._contents.checkpoints:
            if record.checkpoint == checkpoint:
                return record
        known = ", ".join(record.checkpoint for record in self._contents.checkpoints) or "none"
        raise CheckpointError(f"no checkpoint {checkpoint!r} here; known: {known}")

    def put(self, record: CheckpointRecord) -> None:
        """Add a record, or replace the one with the same ID. Raises `CheckpointError` if it is not durable."""
        records = self.checkpoints
        ids = [known.checkpoint for known in records]
        if record.checkpoint in ids:
            records[ids.index(record.checkpoint)] = record
        else:
            records.append(record)
        self._store(msgspec.structs.replace(self._contents, checkpoints=records))

    def label(self, checkpoint: str, label: CheckpointLabel, reason: str) -> CheckpointRecord:
        """Set a label. A tainted checkpoint stays tainted. Raises `CheckpointError`."""
        record = self.find(checkpoint)
        if record.label == "tainted" or (record.label, record.reason) == (label, reason):
            return record
        record = msgspec.structs.replace(record, label=label, reason=reason)
        self.put(record)
        return record

    def drop(self, checkpoint: str) -> None:
        """Remove the record of a checkpoint whose folder is gone."""
        records = [record for record in self._contents.checkpoints if record.checkpoint != checkpoint]
        self._store(msgspec.structs.replace(self._contents, checkpoints=records))

    def add_rollback(self, rollback: Rollback) -> None:
        """Add a rollback. Raises `CheckpointError` if it is not durable."""
        self._store(msgspec.structs.replace(self._contents, rollbacks=[*self._contents.rollbacks, rollback]))

    def _store(self, contents: Contents) -> None:
        # In memory first: even on a full disk this process must remember that a checkpoint is tainted.
        self._contents = contents
        if not self._is_writer:
            return
        data = msgspec.json.format(msgspec.json.encode(contents), indent=2) + b"\n"
        try:
            replace_file(self._root / NAME, data, durable=True)
        except OSError as error:
            raise CheckpointError(f"ledger cannot be written: {error}") from error
        try:
            replace_file(self._root / COPY, data, durable=False)
        except OSError as error:
            logger.debug("the ledger has no copy: %s", error)

    def _open(self) -> None:
        path = self._root / NAME
        contents = Contents()
        if not self._is_writer and not path.exists() and self._contents.checkpoints:
            return  # known before, so the file system is slow to show the replaced file
        try:
            contents = _read(path)
        except FileNotFoundError:
            contents = self._copied(Contents())
        except (OSError, msgspec.DecodeError, ValueError) as error:
            self.notes.append(f"{path} cannot be read ({error}): its copy is used")
            contents = self._copied(None)
        kept = [record for record in contents.checkpoints if (self._root / record.checkpoint / manifests.NAME).exists()]
        known = {record.checkpoint for record in kept}
        adopted: list[CheckpointRecord] = []
        for folder in self._root.iterdir() if self._root.exists() else ():
            if folder.name.startswith(".") or not folder.is_dir() or folder.name in known:
                continue
            try:
                adopted.append(to_record(manifests.read(folder), folder, reason="found without a ledger entry"))
            except CheckpointError as error:
                self.notes.append(f"left aside: {error}")
        records = kept + sorted(adopted, key=lambda record: record.time_unix)
        # Label `pending` means that the process ended during the save. The folder is complete, else it would not be
        # here.
        records = [self._completed(record) if record.label == "pending" else record for record in records]
        self._contents = msgspec.structs.replace(contents, checkpoints=records)

    def _copied(self, default: Contents | None) -> Contents:
        """The contents of the copy. Without a copy `default`, or nothing if that is None, which is noted."""
        try:
            return _read(self._root / COPY)
        except (OSError, msgspec.DecodeError, ValueError):
            if default is None:
                self.notes[-1] = self.notes[-1].removesuffix("its copy is used") + LOST
            return default or Contents()

    def _completed(self, record: CheckpointRecord) -> CheckpointRecord:
        folder = self._root / record.checkpoint
        try:
            return to_record(manifests.read(folder), folder, reason=record.reason)
        except CheckpointError as error:  # loading it will report the same error
            self.notes.append(str(error))
            return msgspec.structs.replace(record, label="candidate")


def _read(path: Path) -> Contents:
    return msgspec.json.decode(path.read_bytes(), type=Contents)


def to_record(manifest: manifests.Manifest, folder: Path, *, reason: str = "") -> CheckpointRecord:
    """The ledger's record of a manifest, labelled candidate, or tainted if the manifest is `spoilt`. A pending
    checkpoint has no manifest yet."""
    spoilt = manifests.spoilt(manifest)
    return CheckpointRecord(
        run=manifest.run,
        attempt=manifest.attempt,
        checkpoint=manifest.checkpoint,
        step=manifest.step,
        path=str(folder),
        label="candidate" if spoilt is None else "tainted",
        reason=reason if spoilt is None else spoilt,
        has_data_position=manifest.data_position_included,
        samples=manifest.samples,
        time_unix=manifest.time_unix,
    )
