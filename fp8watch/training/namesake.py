"""Whether somebody else trains under the same run name: they would share a store, an agent and a journal, unnoticed.

A run that is started again after its end goes on under its name, and teacher and student have a name each. Two that
are alive at once under one name are taken for one run: their frames mix, and commands for one reach the other.

One file a rank, locked for as long as it is watched. The kernel lets go of the lock when the process ends, however it
ends, and a process that is forked does not hold it. Where the folder cannot be written, or lies on a network file
system, where a lock may have to be waited for, nothing is known.
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
    """A lock that this process has: closing any descriptor of the file would let go of it, so there is one."""

    descriptor: int
    pid: int
    times: int


_held: dict[Path, _Held] = {}


def claim(folder: Path, rank: int) -> tuple[str, Callable[[], None]]:
    """(who else has this rank of this run, empty if nobody is known; what to call at the end). Raises nothing."""
    # Without links: the same file under another name would lose the lock of the first when it is closed.
    path = Path(os.path.realpath(folder)) / f"attached-{rank}.lock"
    ours = _held.get(path)
    if ours is not None and ours.pid == os.getpid():
        ours.times += 1
        return OURS, _releasing(path, ours)
    try:
        if is_on_network(folder):
            return "", _nothing
        # Not what a link in a folder that others can write leads to: it is written over.
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
    """What is said of it."""
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
