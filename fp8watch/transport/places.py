"""Paths of a run's socket, log and endpoint, derived from the run's name, FP8WATCH_DIR and the environment.

So all local ranks and the background process find the same paths without communication, if XDG_RUNTIME_DIR and the
temporary directory are the same for all.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` holds 108 bytes with the closing zero (unix(7))."""

UNWRITABLE = "FP8WATCH_DIR cannot be written"
"""First words of the background process's message that FP8WATCH_DIR is not writable. A rank that has reported this
does not warn again."""


def run_folder(directory: Path, run: str) -> Path:
    """`directory/runs/<run>`; characters unsuitable for a file name are replaced, and a digest is added."""
    name = re.sub(r"[^A-Za-z0-9._=+@-]", "_", run)[:120]
    if name != run or name in ("", ".", ".."):
        name = f"{name.strip('.')}-{_digest(run)}"
    return directory / "runs" / name


def endpoint_file(directory: Path, run: str) -> Path:
    """The file that names a run's process, socket, metrics address and store."""
    return run_folder(directory, run) / "endpoint.json"


def directory_digest(directory: Path) -> str:
    """Identifies FP8WATCH_DIR in names outside of it, so that runs of the same name in two directories are distinct."""
    return _digest(str(directory.absolute()))


def state_folders(directory: Path) -> list[Path]:
    """Folders to try, in this order, for records when FP8WATCH_DIR is not writable, full or on a network file
    system."""
    digest = directory_digest(directory)
    state_home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folders = [Path(state_home) / "fp8watch" / digest] if os.path.isabs(state_home) else []
    return [*folders, Path(tempfile.gettempdir()) / f"fp8watch-state-{os.getuid()}" / digest]


def socket_path(directory: Path, run: str) -> Path:
    """The run's socket, at most 107 bytes long, in a folder that only this user can enter.

    Raises `OSError` when no such folder can be made.
    """
    name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', run)[:24]}-{_digest(f'{run}:{directory.absolute()}')}.sock"
    problems = []
    for folder in _socket_folders():
        path = folder / name
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            problems.append(f"{folder}: path too long for a socket")
            continue
        try:
            private_folder(folder)
        except OSError as error:
            problems.append(str(error))
            continue
        return path
    raise OSError(f"no folder for a socket: {'; '.join(problems)}")


def private_folder(folder: Path) -> None:
    """Make a 0700 folder, or check that it is a real folder of this user. Raises `OSError`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of user {os.getuid()}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)


def _socket_folders() -> list[Path]:
    folders = []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        folders.append(Path(runtime) / "fp8watch")
    folders.append(Path(tempfile.gettempdir()) / f"fp8watch-{os.getuid()}")
    folders.append(Path("/tmp") / f"fp8watch-{os.getuid()}")
    return folders


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
