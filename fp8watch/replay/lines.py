"""The lines of a log, one at a time and never longer than `LIMIT`: what memory a reader takes is known.

UTF-8, with or without byte-order mark; bytes that are none become U+FFFD, which no number holds. UTF-16 is known by
its mark. Line ends are those of any system.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from fp8watch.errors import BadInput

LIMIT = 1 << 20
"""Characters. The longest line of a log that a reader here knows has some hundred."""


def lines(path: Path) -> Iterator[str]:
    """Each line with its end. Raises `BadInput` at one beyond the limit (what came before it counts), `OSError`."""
    with path.open("rb") as raw:
        head = raw.read(4)
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if is_utf16 else "utf-8-sig"
    with path.open(newline="", encoding=encoding, errors="replace") as handle:
        number = 0
        while line := handle.readline(LIMIT + 1):
            number += 1
            if len(line) > LIMIT:
                raise BadInput([f"{path}:{number}: line: longer than {LIMIT} characters"])
            yield line
