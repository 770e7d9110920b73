"""The incarnation number of an agent process: larger than that of every earlier agent of the node, whatever the clock.

A controller accepts an agent's entries only in increasing order of (incarnation, sequence). If the number were just the
start time, a node whose clock was set back would be ignored until its clock had caught up. So the newest number is kept
on disk.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from fp8watch.atomic_file import replace_file

logger = logging.getLogger(__name__)
NAME = "incarnation"
MAX_NUMBER = 2**62
"""Half of what an envelope holds. A file with a larger number was not written by an agent."""


def begin(folder: Path, now_ns: int) -> int:
    """This process's number, saved in `folder` for its successor. `now_ns`: Unix time in nanoseconds.

    If the folder cannot be written, the number is the time alone. Raises nothing.
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
        logger.warning(
            "the start number of this agent cannot be saved (%s): if the node's clock is set back, controllers ignore "
            "the next agent until the clock has caught up", error,
        )  # fmt: skip
    return number
