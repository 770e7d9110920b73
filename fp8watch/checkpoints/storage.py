"""The storages of model and optimizer: `torch.save`, `torch.distributed.checkpoint`, or the user's functions.

Each rank's own state (random state, data position, scheduler, scaler, FP8 state) is always written by fp8watch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fp8watch.checkpoints.config import Checkpoints
from fp8watch.checkpoints.files import HashingWriter, measure, with_quick_sums
from fp8watch.checkpoints.manifest import FileEntry
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place
from fp8watch.errors import CheckpointError

Poll = Callable[[], dict[str, FileEntry] | None]
"""Returns this rank's files once all are durable, else None. Raises what failed."""

Restore = Callable[[], None]
"""Overwrites the live model and optimizer."""


class Unfit(CheckpointError):
    """The checkpoint is intact, but belongs to another model, optimizer or number of ranks."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A save for which this rank is ready. Exactly one of `begin` and `cancel` is called."""

    kept: dict[str, Any]
    """What `load` needs besides the storage's own files: tensors and plain values."""
    begin: Callable[[], Poll]
    """Begin to write; called when all ranks are ready. Raises immediate errors."""
    cancel: Callable[[], None] = _nothing


class Storage(Protocol):
    """Writes and reads model and optimizer in a checkpoint's folder."""

    name: str
    """torch, dcp or callback."""

    writes_own_files: bool
    """True: model and optimizer are not in the files of `contents.capture`, and ranks may wait for each other during
    the write, so all must begin or none."""

    def prepare(self, folder: Path, parts: TrainingParts, place: Place) -> Prepared:
        """Do everything that can fail on one rank alone. Raises any error."""

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any], *, is_same_world: bool = True) -> Restore:
        """Read without overwriting; returns the function that overwrites. `is_same_world`: saved by as many ranks as
        now. Raises `CheckpointError`, `Unfit` when the checkpoint is intact but does not fit."""


class TorchStorage:
    """Has no files of its own: model and optimizer are files like the others."""

    name = "torch"
    writes_own_files = False

    def prepare(self, folder: Path, parts: TrainingParts, place: Place) -> Prepared:
        """See `Storage`."""
        return Prepared(kept={}, begin=lambda: dict)

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any], *, is_same_world: bool = True) -> Restore:
        """See `Storage`."""
        return _nothing


class CallbackStorage:
    """The functions given as `Checkpoints(save=, load=)`. Called on every rank with a folder shared by all ranks.

    `save` may return an object with `done()` and `result()`; the checkpoint is then pending until it is done.
    """

    name = "callback"
    writes_own_files = True
    FOLDER = "user"

    def __init__(self, save: Callable[[Path], Any], load: Callable[[Path], Any]) -> None:
        self._save, self._load = save, load

    def prepare(self, folder: Path, parts: TrainingParts, place: Place) -> Prepared:
        """See `Storage`. Rank 0 measures the files when they are durable, because their owner is unknown."""
        target = folder / self.FOLDER
        target.mkdir(exist_ok=True)

        def begin() -> Poll:
            handle = self._save(target)

            def poll() -> dict[str, FileEntry] | None:
                if handle is not None and hasattr(handle, "result"):
                    if not handle.done():
                        return None
                    handle.result()
                return {}

            return poll

        return Prepared(kept={}, begin=begin)

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any], *, is_same_world: bool = True) -> Restore:
        """See `Storage`."""
        return lambda: self._load(folder / self.FOLDER)


def storage_of(config: Checkpoints) -> Storage:
    """The storage that the settings ask for."""
    if config.save is not None and config.load is not None:
        return CallbackStorage(config.save, config.load)
    if config.format == "dcp":
        from fp8watch.checkpoints.dcp import DcpStorage

        return DcpStorage(background=config.background)
    return TorchStorage()


def write_files(folder: Path, files: dict[str, Any], common: dict[str, Any] | None = None) -> dict[str, FileEntry]:
    """Write each file durably with `torch.save`; of `common` only those that no other rank has begun.

    Raises what `torch.save` and the file system raise.
    """
    entries = {}
    for name, content in {**files, **(common or {})}.items():
        try:
            file = open(folder / name, "wb" if name in files else "xb")  # noqa: SIM115
        except FileExistsError:
            continue
        with file:
            writer = HashingWriter(file)
            torch.save(content, writer)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        entries[name] = writer.entry()
    return with_quick_sums(folder, entries)


def names_of_nobody(folder: Path, known: Collection[str]) -> list[str]:
    """Files in sub-folders that are in no rank's part. Raises `OSError`."""
    inside = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent != folder)
    return [name for path in inside if (name := str(path.relative_to(folder))) not in known]


def measure_all(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    """Sync each file and return its size and checksums. Raises `OSError`."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
        found[name] = measure(folder / name)
    return found


def refuse_unsaved(poll: Poll) -> dict[str, FileEntry] | None:
    """`poll()`, with every error raised as `CheckpointError`."""
    try:
        return poll()
    except Exception as error:
        raise CheckpointError(f"model and optimizer could not be written: {error}") from error
