"""A queue on disk for messages that could not be sent, bounded in size.

It consists of segments of `SEGMENT_BYTES`; a segment is removed when all of it was sent. Above the limit frames are
dropped, oldest first, and counted. Other messages (hellos, layouts, checkpoints, results) are small and stay, and so
does the segment being written. A new process sends what its predecessor left. Entries sent but not yet removed are sent
again; the receiver recognises them by their sequence number.

If the disk cannot be written, the newest entries are held in memory, up to `MEMORY_BYTES`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8watch.atomic_file import replace_file

logger = logging.getLogger(__name__)
SEGMENT_BYTES = 4 * 1024**2
MEMORY_BYTES = 16 * 1024**2
_MODE = 0o600
"""Mode of a segment, which holds what a run sends."""
_HEAD = struct.Struct(">IHB")
"""Length of the data, length of the run's name, 1 for a frame."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A sealed message of one run."""

    run: str
    is_frame: bool
    data: bytes

    @property
    def size(self) -> int:
        """Size in bytes on disk."""
        return _HEAD.size + len(self.run.encode()) + len(self.data)


class Spool:
    """Not thread-safe. `lost` counts by reason: entries for spool_full and disk_full, segments for damaged."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._memory: deque[Entry] = deque()
        self._memory_bytes = 0
        self._front: deque[Entry] | None = None
        """The entries left of the oldest segment, once it was read."""
        self._front_path: Path | None = None
        self._writer: int | None = None
        self._writer_path: Path | None = None
        self._writer_bytes = 0
        self._is_disk_bad = False
        self.lost: Counter[str] = Counter()
        self.errors = 0
        """How often an entry was held in memory because it could not be written."""
        self._sizes: dict[Path, int] = {}
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in sorted(folder.glob("*.seg")):
                self._sizes[path] = path.stat().st_size
            for partial in folder.glob(".*.seg.*.partial"):  # of an agent killed while shortening one
                partial.unlink(missing_ok=True)
        self._next = 1 + max((int(path.stem) for path in self._sizes if path.stem.isdigit()), default=0)

    @property
    def is_empty(self) -> bool:
        """Whether there are no entries."""
        return not self._front and not self._memory and not self._sizes

    @property
    def size_bytes(self) -> int:
        """Bytes on disk and in memory."""
        return sum(self._sizes.values()) + self._memory_bytes

    def put(self, entry: Entry) -> None:
        """Add an entry at the end."""
        name = entry.run.encode()
        data = _HEAD.pack(len(entry.data), len(name), entry.is_frame) + name + entry.data
        try:
            if self._memory:  # keeps the order
                raise OSError("entries wait in memory")
            self._write(data)
        except OSError as error:
            self._hold(entry, error)
            return
        if self._is_disk_bad:
            self._is_disk_bad = False
            logger.info("spool %s can be written again", self._folder)
        self._shrink()

    def peek(self, count: int, limit_bytes: int = 2**22) -> list[Entry]:
        """The oldest entries, at most `count` and about `limit_bytes`. They stay until `drop`."""
        found: list[Entry] = []
        size = 0
        for entry in self._oldest():
            if found and (len(found) >= count or size + entry.size > limit_bytes):
                break
            found.append(entry)
            size += entry.size
        return found

    def drop(self, count: int) -> None:
        """Remove the oldest `count` entries of the last `peek`, which have been sent."""
        for _ in range(count):
            if self._front:
                self._front.popleft()
            elif self._memory:
                self._memory_bytes -= self._memory.popleft().size
        if self._front is not None and not self._front:
            self._remove_front()

    def close(self) -> None:
        """Close the segment being written. Entries on disk stay."""
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def _oldest(self) -> Iterator[Entry]:
        if not self._front:
            self._load_front()
        if self._front:
            yield from self._front
        elif self._memory:
            yield from self._memory

    def _load_front(self) -> None:
        while self._sizes:
            path = next(iter(self._sizes))
            if path == self._writer_path:
                self.close()
                self._writer_path = None
            self._front_path, self._front = path, deque(self._read(path))
            if self._front:
                return
            self._remove_front()

    def _remove_front(self) -> None:
        assert self._front_path is not None
        with contextlib.suppress(OSError):
            self._front_path.unlink()
        self._sizes.pop(self._front_path, None)
        self._front = self._front_path = None

    def _read(self, path: Path) -> Iterator[Entry]:
        try:
            data = path.read_bytes()
        except OSError as error:
            logger.warning("spool segment %s cannot be read: %s", path, error)
            self.lost["damaged"] += 1
            return
        position = 0
        while position + _HEAD.size <= len(data):
            length, name_length, is_frame = _HEAD.unpack_from(data, position)
            start = position + _HEAD.size
            end = start + name_length + length
            if end > len(data):  # cut off when its process was killed
                self.lost["damaged"] += 1
                return
            run = data[start : start + name_length].decode(errors="replace")
            yield Entry(run, bool(is_frame), data[start + name_length : end])
            position = end

    def _write(self, data: bytes) -> None:
        if self._writer is None or self._writer_bytes >= SEGMENT_BYTES:
            self.close()
            path = self._folder / f"{self._next:012d}.seg"
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, _MODE)
            self._writer_path, self._writer_bytes = path, 0
            self._next += 1
            self._sizes[path] = 0
        assert self._writer_path is not None
        written = os.write(self._writer, data)
        if written != len(data):
            os.ftruncate(self._writer, self._writer_bytes)  # half an entry would hide those after it
            raise OSError(28, "no space left on device")
        self._writer_bytes += written
        self._sizes[self._writer_path] = self._writer_bytes

    def _hold(self, entry: Entry, error: OSError) -> None:
        if not self._is_disk_bad and not self._memory:
            logger.warning("spool %s cannot be written (%s): holding the newest in memory", self._folder, error)
        self._is_disk_bad = True
        self.errors += 1
        self._memory.append(entry)
        self._memory_bytes += entry.size
        while self._memory_bytes > min(MEMORY_BYTES, self._limit):
            oldest = next((item for item in self._memory if item.is_frame), self._memory[0])
            self._memory.remove(oldest)
            self._memory_bytes -= oldest.size
            self.lost["disk_full"] += 1

    def _shrink(self) -> None:
        if sum(self._sizes.values()) <= self._limit:
            return
        for path in list(self._sizes):
            if path == self._writer_path or sum(self._sizes.values()) <= self._limit:
                return
            is_front = path == self._front_path and self._front is not None
            held = list(self._front or ()) if is_front else list(self._read(path))
            kept = [entry for entry in held if not entry.is_frame]
            if len(kept) == len(held):
                continue
            self.lost["spool_full"] += len(held) - len(kept)
            if path == self._front_path:
                self._front = deque(kept)
            self._rewrite(path, kept)

    def _rewrite(self, path: Path, kept: list[Entry]) -> None:
        parts = [
            _HEAD.pack(len(e.data), len(e.run.encode()), e.is_frame) + e.run.encode() + e.data for e in kept
        ]  # fmt: skip
        for is_last in (False, True):
            try:
                # Durable: a power failure now must not lose the entries that the old segment held.
                replace_file(path, b"".join(parts), durable=True, mode=_MODE)
                self._sizes[path] = sum(map(len, parts))
                return
            except OSError as error:
                # A full disk may have room once the old segment is gone.
                with contextlib.suppress(OSError):
                    path.unlink()
                if is_last:
                    logger.warning("spool segment %s cannot be shortened: %s", path, error)
        self._sizes.pop(path, None)
        if path != self._front_path:  # whose entries are in memory
            self.lost["disk_full"] += len(kept)
