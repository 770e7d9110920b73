"""Who writes model and optimizer: torch.save a file a rank, `torch.distributed.checkpoint`, or the user's own function.

What is each rank's own (random state, data position, scheduler, scaler, FP8 state) is always written by us.
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
"""Files written by this rank once all of them are durable; None: not yet. Raises what went wrong."""

Restore = Callable[[], None]
"""Overwrites the live model and optimizer."""


class Unfit(CheckpointError):
    """The checkpoint is sound, but is not one of this model, optimizer or number of ranks."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A save of which this rank has all that it needs; exactly one of the two is called."""

    kept: dict[str, Any]
    """What `load` needs beside the storage's own files: tensors and plain values."""
    begin: Callable[[], Poll]
    """Begin to write, when all ranks do. Raises what goes wrong at once."""
    cancel: Callable[[], None] = _nothing


class Storage(Protocol):
    """Writes and reads model and optimizer in a checkpoint's folder."""

    name: str
    """torch, dcp or callback."""

    writes_own_files: bool
    """True: model and optimizer are not in the files that `contents.capture` describes, and ranks may wait for each
    other while they are written: none may begin unless all do."""

    def prepare(self, folder: Path, parts: TrainingParts, place: Place) -> Prepared:
        """All that can go wrong on one rank alone. Raises whatever that is."""

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any], *, is_same_world: bool = True) -> Restore:
        """Read, as far as that is possible without overwriting; what then overwrites. `is_same_world`: saved by as many
        ranks as are here. Raises `CheckpointError`, `Unfit` when it is sound and not for us."""


class TorchStorage:
    """Nothing of its own: model and optimizer are files like the others."""

    name = "torch"
    writes_own_files = False

    def prepare(self, folder: Path, parts: TrainingParts, place: Place) -> Prepared:
        """See `Storage`."""
        return Prepared(kept={}, begin=lambda: dict)

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any], *, is_same_world: bool = True) -> Restore:
        """See `Storage`."""
        return _nothing


class CallbackStorage:
    """The functions given as `Checkpoints(save=, load=)`, called on every rank with a folder that all ranks share.

    `save` may return an object with `done()` and `result()`: the checkpoint is pending until then.
    """

    name = "callback"
    writes_own_files = True
    FOLDER = "user"

    def __init__(self, save: Callable[[Path], Any], load: Callable[[Path], Any]) -> None:
        self._save, self._load = save, load

    def prepare(self, folder: Path, parts: TrainingParts, place: Place) -> Prepared:
        """See `Storage`. Files are summed up by rank 0, which cannot know whose they are, when all are durable."""
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
    """Write each of them with `torch.save`, durably; of `common` those that no other rank has begun to write.

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
    """Files in sub-folders that no rank has summed up. Raises `OSError`."""
    inside = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent != folder)
    return [name for path in inside if (name := str(path.relative_to(folder))) not in known]


def measure_all(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    """Size and sum of each, made durable. Raises `OSError`."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
        found[name] = measure(folder / name)
    return found


def refuse_unsaved(poll: Poll) -> dict[str, FileEntry] | None:
    """`poll()`, with everything it raises as a `CheckpointError`."""
    try:
        return poll()
    except Exception as error:
        raise CheckpointError(f"model and optimizer could not be written: {error}") from error
