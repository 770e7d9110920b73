"""Locks a directory of checkpoints, so that only one run writes into it.

Two runs would overwrite each other's ledger, and one would offer the checkpoints that the other has marked as tainted.
The process that writes the ledger locks a file beside it. The kernel releases the lock when the process ends, and a
forked process does not inherit it. Such a lock does not exclude other runs of the same process; a list does. A file
system without locks is reported.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path

from fp8watch.checkpoints.aside import later
from fp8watch.errors import CheckpointError

NAME = ".in-use"
PATIENCE_SECONDS = 5.0
"""How long to retry the lock, because the previous process may be about to end. Also the timeout of the file system."""

_ours: dict[Path, tuple[int, str]] = {}
"""Directories that this process writes into -> process ID (a forked process inherits the list) and run."""


class Owner:
    """The lock on a directory, held until `release`."""

    def __init__(self, root: Path, run: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Raises `CheckpointError` naming the holder."""
        # Resolved: closing the same file under another name would release the first lock.
        self._root = Path(os.path.realpath(root))
        self._descriptor: int | None = None
        self._pid, self._is_held = os.getpid(), False
        self.note = ""
        """Why other processes are not excluded; empty: they are."""
        known = _ours.get(self._root)
        if known is not None and known[0] == self._pid:
            raise CheckpointError(
                f"run {known[1]} of this process saves into {root} already; give each its own directory, or detach() "
                "the first watch"
            )
        deadline = time.monotonic() + patience_seconds
        while (who := self._lock(run)) is not None:
            if time.monotonic() >= deadline:
                raise CheckpointError(f"{who} saves into {root}; give each run a directory of its own")
            time.sleep(0.1)
        _ours[self._root] = (self._pid, run)
        self._is_held = True

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if not self._is_held or self._pid != os.getpid():
            return
        self._is_held = False
        _ours.pop(self._root, None)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._root / NAME)
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _lock(self, run: str) -> str | None:
        """Returns the holder; None: locked, or locking is impossible (see `note`)."""
        try:
            # On its own thread: a network file system may block.
            return later(lambda: self._lock_now(run)).result(PATIENCE_SECONDS)
        except (OSError, RuntimeError, NotInTime) as error:
            self.note = (
                f"checkpoints: {self._root} cannot be locked ({str(error) or 'no answer'}): nothing keeps another "
                "process from saving there"
            )
            return None

    def _lock_now(self, run: str) -> str | None:
        path = self._root / NAME
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                who = _name_in(descriptor)
                os.close(descriptor)
                return who
            except OSError:
                os.close(descriptor)
                raise
            if _is_file_of(path, descriptor):
                break
            os.close(descriptor)  # removed by its owner meanwhile
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"run {run} (process {os.getpid()} on {socket.gethostname()})\n".encode(), 0)
        self._descriptor = descriptor
        return None


def _is_file_of(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _name_in(descriptor: int) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = os.pread(descriptor, 400, 0).decode().strip()
        if text and text.isprintable():
            return text
    return "another process"
