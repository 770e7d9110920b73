"""Who writes model and optimizer: torch.save a file a rank, `torch.distributed.checkpoint`, or the user's own function.

What is each rank's own (random state, data position, scheduler, scaler, FP8 state) is always written by us.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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


class Storage(Protocol):
    """Writes and reads model and optimizer in a checkpoint's folder."""

    name: str
    """torch, dcp or callback."""

    writes_own_files: bool
    """True: model and optimizer are not in the files that `contents.capture` describes."""

    def save(self, folder: Path, parts: TrainingParts, place: Place) -> Poll:
        """Begin to write. With several ranks a collective call for dcp. Raises what goes wrong at once."""

    def kept(self, parts: TrainingParts) -> dict[str, Any]:
        """What `load` needs beside the storage's own files: tensors and plain values."""

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any]) -> Restore:
        """Read, as far as that is possible without overwriting; what then overwrites. Raises `CheckpointError`."""


class TorchStorage:
    """Nothing of its own: model and optimizer are files like the others."""

    name = "torch"
    writes_own_files = False

    def save(self, folder: Path, parts: TrainingParts, place: Place) -> Poll:
        """See `Storage`."""
        return dict

    def kept(self, parts: TrainingParts) -> dict[str, Any]:
        """See `Storage`."""
        return {}

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any]) -> Restore:
        """See `Storage`."""
        return lambda: None


class CallbackStorage:
    """The functions given as `Checkpoints(save=, load=)`, called on every rank with a folder that all ranks share.

    `save` may return an object with `done()` and `result()`: the checkpoint is pending until then.
    """

    name = "callback"
    writes_own_files = True
    FOLDER = "user"

    def __init__(self, save: Callable[[Path], Any], load: Callable[[Path], Any]) -> None:
        self._save, self._load = save, load

    def save(self, folder: Path, parts: TrainingParts, place: Place) -> Poll:
        """See `Storage`. Files are summed up by rank 0, which cannot know whose they are, when all are durable."""
        target = folder / self.FOLDER
        target.mkdir(exist_ok=True)
        handle = self._save(target)

        def poll() -> dict[str, FileEntry] | None:
            if handle is not None and hasattr(handle, "result"):
                if not handle.done():
                    return None
                handle.result()
            return {}

        return poll

    def kept(self, parts: TrainingParts) -> dict[str, Any]:
        """See `Storage`."""
        return {}

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any]) -> Restore:
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


def write_files(folder: Path, files: dict[str, Any]) -> dict[str, FileEntry]:
    """Write each of them with `torch.save`, durably. Raises what `torch.save` and the file system raise."""
    entries = {}
    for name, content in files.items():
        with open(folder / name, "wb") as file:
            writer = HashingWriter(file)
            torch.save(content, writer)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        entries[name] = writer.entry()
    return with_quick_sums(folder, entries)


def files_of_nobody(folder: Path, known: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Files in sub-folders that no rank has summed up: size and sum of each. Raises `OSError`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and len(path.relative_to(folder).parts) > 1 and name not in known:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            found[name] = measure(path)
    return found


def refuse_unsaved(poll: Poll) -> dict[str, FileEntry] | None:
    """`poll()`, with everything it raises as a `CheckpointError`."""
    try:
        return poll()
    except Exception as error:
        raise CheckpointError(f"model and optimizer could not be written: {error}") from error
