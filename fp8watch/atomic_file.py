"""Files that others read while they are written: a reader sees the old contents or the new, never a part of them.

Written beside the file under a name of its own and renamed. Durable on top of that where the contents must outlive a
machine that loses power (a halt, a ledger, an agent's number): then the data is synced before the rename, or the name
could point to an empty file afterwards, and the folder after it, or the old name could come back.
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
"""What file systems answer that know no syncing of folders (some FUSE and SMB mounts): nothing more can be done."""


def replace_file(path: Path, data: bytes, *, durable: bool, mode: int | None = None) -> None:
    """`replacing` for contents that are at hand. Raises `OSError` as it does."""
    with replacing(path, durable=durable, mode=mode) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file whose contents take the place of `path`, whose folder exists, when the block ends without an exception.

    On a disk then, if `durable`. `mode`: permissions of the new file; None: those of any new file under this process's
    umask. Raises `OSError` with the old contents in place and nothing left beside them, as an exception of the block
    does; only when the folder cannot be synced, which comes last, are the new contents there and may be lost with the
    power.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        # Not over a name that is there already: in a folder that others can write it may be a link to elsewhere.
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
