"""Checks whether a folder is on a file system that cannot hold a SQLite database, and whether it is writable."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

NETWORK_TYPES = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "pvfs2",
    "orangefs", "wekafs", "ocfs2", "gfs2", "panfs", "virtiofs",
})  # fmt: skip
"""SQLite's WAL mode needs memory shared between processes and does not work on these (sqlite.org/wal.html)."""
PROBE_BYTES = 64 * 1024
"""Bytes written as a test. An empty file can be created even on a full disk."""


def is_network(path: Path, mountinfo: str | None = None) -> bool:
    """Whether `path` is on a network or FUSE file system, according to /proc/self/mountinfo (proc(5))."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return False
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = fields[4].replace("\\040", " ")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind in NETWORK_TYPES or kind.startswith("fuse")


def why_unwritable(folder: Path) -> str | None:
    """Create the folder and write a test file into it. Returns the reason if that fails, else None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".probe.")
        try:
            with contextlib.closing(os.fdopen(handle, "wb", buffering=0)) as file:
                if file.write(bytes(PROBE_BYTES)) != PROBE_BYTES:
                    return f"{folder}: no space left"
        finally:
            os.unlink(name)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return None
