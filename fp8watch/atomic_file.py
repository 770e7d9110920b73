"""Files that others read while they are written: a reader sees the old contents or the new, never a part of them.

A file is written beside its target under a temporary name and renamed. Contents that must survive a loss of power (a
halt, a ledger, an agent's number) are durable as well: the data is synced before the rename, or the name could point to
an empty file afterwards, and the folder after it, or the old name could come back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
"""Errors of file systems that cannot sync folders (some FUSE and SMB mounts): nothing more can be done there."""


def replace_file(path: Path, data: bytes, *, durable: bool, mode: int | None = None) -> None:
    """`replacing`, for contents that are already complete. Raises `OSError` likewise."""
    with replacing(path, durable=durable, mode=mode) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file whose contents replace `path` (in an existing folder) when the block ends without an exception.

    `durable`: the contents are then on disk. `mode`: permissions of the new file; None: those of any new file under
    this process's umask. After an `OSError`, or an exception in the block, the old contents are in place with nothing
    left beside them. There is one exception: when the folder cannot be synced, which is the last step, the new contents
    are there but may not survive a loss of power.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        # Not over an existing name: in a folder that others can write to, it may be a link to somewhere else.
        with open(partial, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(folder: Path) -> None:
    """Make the names in a folder durable, where its file system can. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)
