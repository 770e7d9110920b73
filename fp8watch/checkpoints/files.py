"""Files that are either complete or absent: hashed while written, synced, renamed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from fp8watch.checkpoints.manifest import FileEntry
from fp8watch.errors import CheckpointError

_CHUNK_BYTES = 1 << 20


class HashingWriter:
    """A binary writer that sums up what goes through it; enough of a file for `torch.save`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._sum.update(view)
        self._bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Flush the file beneath."""
        self._file.flush()

    def entry(self) -> FileEntry:
        """Size and SHA-256 of what was written."""
        return FileEntry(bytes=self._bytes, sha256=self._sum.hexdigest())


def sync_directory(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and make it durable."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's contents atomically and durably. Raises `OSError`, the old contents then remain."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def verify(folder: Path, files: dict[str, FileEntry]) -> None:
    """Compare every file with its size and sum. Raises `CheckpointError` naming the first that differs."""
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name:
            raise CheckpointError(f"{folder.name}: the manifest names {name!r}, which is no plain file name")
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                raise CheckpointError(f"{folder.name}/{name}: {size} bytes, the manifest says {entry.bytes}")
            total = hashlib.sha256()
            with open(path, "rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    total.update(chunk)
        except OSError as error:
            raise CheckpointError(f"{folder.name}/{name} cannot be read: {error}") from error
        if total.hexdigest() != entry.sha256:
            raise CheckpointError(f"{folder.name}/{name}: its contents do not match the manifest's SHA-256")
