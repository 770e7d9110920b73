"""Writes, syncs and verifies the files of a checkpoint. Checksums are computed while writing.

Large files are hashed in pieces, so that several threads can verify one: a rollback waits for this.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

from fp8watch.checkpoints.manifest import FileEntry
from fp8watch.checkpoints.quick_sum import quick_sums
from fp8watch.errors import CheckpointError

PIECE_BYTES = 16 << 20
"""Files of at least this size are hashed in pieces of this size."""
_READ_BYTES = 1 << 20
_MAX_THREADS = 8


_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "wekafs", "9p", "fuse", "afs", "glusterfs")


def is_on_network(path: Path) -> bool:
    """Whether a file is on a file system that can remove it while it is memory-mapped, which would kill the process.

    Uses the mount table. Unknown counts as network.
    """
    try:
        found = ("", "nfs")
        target = str(path.resolve())
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split(" ")
            mount = mount.replace("\\040", " ")
            is_above = mount == "/" or target == mount or target.startswith(mount + "/")
            if is_above and len(mount) >= len(found[0]):
                found = (mount, kind)
        return found[1].startswith(_NETWORK)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a symbolic link loop
        return True


class HashingWriter:
    """A binary writer that hashes what is written, with the methods that `torch.save` needs."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._piece = hashlib.sha256()
        self._digests: list[bytes] = []
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        rest = view
        while rest:
            room = PIECE_BYTES - self._bytes % PIECE_BYTES
            taken = rest[:room]
            self._piece.update(taken)
            self._bytes += len(taken)
            if len(taken) == room:
                self._digests.append(self._piece.digest())
                self._piece = hashlib.sha256()
            rest = rest[room:]
        return len(view)

    def flush(self) -> None:
        """Flush the underlying file."""
        self._file.flush()

    def entry(self) -> FileEntry:
        """Size and SHA-256 of what was written."""
        if self._bytes < PIECE_BYTES:
            return FileEntry(bytes=self._bytes, sha256=self._piece.hexdigest())
        digests = [*self._digests, self._piece.digest()] if self._bytes % PIECE_BYTES else self._digests
        return FileEntry(bytes=self._bytes, sha256=_sum(digests), piece_bytes=PIECE_BYTES)


def _sum(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and make it durable."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def measure(path: Path) -> FileEntry:
    """Size and checksums of a file written by others. Raises `OSError`."""
    size = path.stat().st_size
    piece = PIECE_BYTES if size >= PIECE_BYTES else 0
    sha256, quick = _hash([(path, size, piece)])[0], quick_sums([(path, size)])[0]
    return FileEntry(bytes=size, sha256=sha256, piece_bytes=piece, quick_sum=quick)


def with_quick_sums(folder: Path, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Add the quick sums of files that were just written and are still in the page cache. Raises `OSError`."""
    sums = quick_sums([(folder / name, entry.bytes) for name, entry in files.items()])
    return {
        name: msgspec.structs.replace(entry, quick_sum=found)
        for (name, entry), found in zip(files.items(), sums, strict=True)
    }


def check_sizes(folder: Path, files: dict[str, FileEntry]) -> None:
    """Check every file's size without reading it. Raises `CheckpointError` naming the first that differs."""
    for name, entry in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or name != str(Path(name)):
            raise CheckpointError(f"{folder.name}: the manifest names {name!r}, which is no plain file name")
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder.name}/{name} cannot be read: {error}") from error
        if size != entry.bytes:
            raise CheckpointError(f"{folder.name}/{name}: {size} bytes, the manifest says {entry.bytes}")


def verify(
    folder: Path, files: dict[str, FileEntry], *, is_quick: bool = False, max_threads: int = _MAX_THREADS
) -> None:
    """Check every file's size and SHA-256, or with `is_quick` the quick sum where it is known.

    Raises `CheckpointError` naming the first file that differs.
    """
    check_sizes(folder, files)
    if is_quick:
        quick = {name: entry for name, entry in files.items() if entry.quick_sum}
        try:
            sums = quick_sums(
                [(folder / name, entry.bytes) for name, entry in quick.items()], is_mapped=not is_on_network(folder)
            )
        except OSError as error:
            raise CheckpointError(f"{folder.name} cannot be read: {error}") from error
        for (name, entry), found_sum in zip(quick.items(), sums, strict=True):
            if found_sum != entry.quick_sum:
                raise CheckpointError(f"{folder.name}/{name}: its contents do not match the manifest's sum")
        files = {name: entry for name, entry in files.items() if name not in quick}
    try:
        pieces = [(folder / name, entry.bytes, entry.piece_bytes) for name, entry in files.items()]
        found = _hash(pieces, max_threads)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder.name} cannot be read: {error}") from error
    for (name, entry), digest in zip(files.items(), found, strict=True):
        if digest != entry.sha256:
            raise CheckpointError(f"{folder.name}/{name}: its contents do not match the manifest's SHA-256")


def _hash(files: list[tuple[Path, int, int]], max_threads: int = _MAX_THREADS) -> list[str]:
    """SHA-256 of (path, size, bytes per piece or 0) files. Uses at most `max_threads` threads, and one per core."""
    pieces = [(path, start, length) for path, size, piece in files for start, length in _pieces(size, piece)]
    threads = min(max_threads, len(os.sched_getaffinity(0)), len(pieces))
    if threads < 2:
        digests = iter([_hash_piece(*piece) for piece in pieces])
    else:
        with ThreadPoolExecutor(threads) as pool:
            digests = iter(list(pool.map(lambda piece: _hash_piece(*piece), pieces)))
    found = []
    for _, size, piece in files:
        own = [next(digests) for _ in _pieces(size, piece)]
        found.append(_sum(own) if piece else own[0].hex())
    return found


def _pieces(size: int, piece: int) -> list[tuple[int, int]]:
    if not piece:
        return [(0, size)]
    return [(start, min(piece, size - start)) for start in range(0, size, piece)]


def _hash_piece(path: Path, start: int, length: int) -> bytes:
    """Reads without mapping, because a file that shrinks must raise an error and not a signal."""
    total = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while length > 0:
            data = os.pread(descriptor, min(_READ_BYTES, length), start)
            if not data:
                raise OSError(f"{path.name} ended early")
            total.update(data)
            start, length = start + len(data), length - len(data)
    finally:
        os.close(descriptor)
    return total.digest()
