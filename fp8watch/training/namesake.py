"""Detects a second live process under the same run name and rank.

Two processes under one name are taken for one run: they share a store, an agent and a journal, their frames mix, and
commands for one reach the other. A run that is restarted after its end keeps its name.

Each rank locks one file while it is watched. The kernel releases the lock when the process ends, however it ends, and a
forked child does not hold it. There is no check where the folder cannot be written, or is on a network file system,
where taking a lock may block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8watch.checkpoints.files import is_on_network

OURS = "another watch of this process"


@dataclass(slots=True, kw_only=True)
class _Held:
    """A lock of this process. Closing any descriptor of the file would release it, so only one is opened."""

    descriptor: int
    pid: int
    times: int


_held: dict[Path, _Held] = {}


def claim(folder: Path, rank: int) -> tuple[str, Callable[[], None]]:
    """Lock a rank of a run. Returns who else holds it (empty: nobody known) and a function that releases it. Raises
    nothing."""
    # Links are resolved, because closing the same file under another name would release the first lock.
    path = Path(os.path.realpath(folder)) / f"attached-{rank}.lock"
    ours = _held.get(path)
    if ours is not None and ours.pid == os.getpid():
        ours.times += 1
        return OURS, _releasing(path, ours)
    try:
        if is_on_network(folder):
            return "", _nothing
        # The file is overwritten, so a link that another user may have put here is not followed.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError:
        return "", _nothing
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = _name_of(descriptor) if isinstance(error, BlockingIOError | PermissionError) else ""
        os.close(descriptor)
        return who, _nothing
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    held = _held[path] = _Held(descriptor=descriptor, pid=os.getpid(), times=1)
    return "", _releasing(path, held)


def warning(run: str, who: str) -> str:
    """The warning about a second process, named by `who`."""
    waits = "" if who == OURS else ", unless it is this one's last start and about to end"
    return (
        f"run {run} is the name of {who} too{waits}: the two share one store and are taken for one run; give each a "
        "name of its own with attach(..., run=...)"
    )


def _name_of(descriptor: int) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = os.pread(descriptor, 200, 0).decode().strip()
        if text.isprintable() and text:
            return text
    return "another process"


def _releasing(path: Path, held: _Held) -> Callable[[], None]:
    is_over = False

    def release() -> None:
        nonlocal is_over
        if is_over:
            return
        is_over = True
        held.times -= 1
        if held.times == 0 and held.pid == os.getpid():
            _held.pop(path, None)
            with contextlib.suppress(OSError):
                os.close(held.descriptor)

    return release


def _nothing() -> None:
    return None
