"""The number under which an agent process of a node sends: larger than that of any before it, whatever its clock says.

A controller takes an agent's entries in increasing order of (incarnation, sequence) only. The time of the start alone
would make a node whose clock was set back unheard until its clock has caught up, so the newest number is kept on disk.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from fp8watch.atomic_file import replace_file

logger = logging.getLogger(__name__)
NAME = "incarnation"
MAX_NUMBER = 2**62
"""Half of what an envelope holds: a file with more than that was not written by an agent."""


def begin(folder: Path, now_ns: int) -> int:
    """This process's number; kept in `folder` for its successor. `now_ns`: Unix time in nanoseconds.

    Without a disk that can be written it is the time alone. Raises nothing.
    """
    path = folder / NAME
    known = 0
    with contextlib.suppress(OSError, ValueError):
        known = int(path.read_text(encoding="ascii"))
    if known > now_ns:
        logger.warning("this node's clock was set back %.0f s since its last agent began", (known - now_ns) / 1e9)
    number = max(now_ns, known + 1 if 0 <= known < MAX_NUMBER else 0)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, str(number).encode("ascii"), durable=True)
    except OSError as error:
        logger.warning("the number of this agent cannot be kept (%s): its clock must not be set back", error)
    return number
