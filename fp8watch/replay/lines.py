"""The lines of a log, one at a time and never longer than `LIMIT`: what memory a reader takes is known.

UTF-8, with or without byte-order mark; bytes that are none become U+FFFD, which no number holds. UTF-16 and UTF-32 are
known by their mark. Line ends are those of any system.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8watch.errors import BadInput

LIMIT = 1 << 20
"""Characters. The longest line of a log that a reader here knows has some hundred."""

SHOWN = 60
"""Characters of a cell or name that a message shows."""


def shown(text: str) -> str:
    """A cell or name as a message can hold it: one line, short, nothing that moves a terminal's cursor."""
    plain = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return plain if len(plain) <= SHOWN else f"{plain[:SHOWN]}... ({len(text)} characters)"


_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",  # before UTF-16's, with which one of them begins
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The first bytes of a file, and as what its text is read."""

    raw: bytes
    encoding: str

    @property
    def text(self) -> str:
        """The same as text; a character that is cut off at the end becomes U+FFFD."""
        return self.raw.decode(self.encoding, errors="replace")


def beginning(path: Path, most: int) -> Beginning:
    """At most so many bytes of a file. Raises `OSError`."""
    with path.open("rb") as handle:
        raw = handle.read(most)
    encoding = next((name for mark, name in _MARKS.items() if raw.startswith(mark)), "utf-8-sig")
    return Beginning(raw=raw, encoding=encoding)


def lines(path: Path) -> Iterator[str]:
    """Each line with its end. Raises `BadInput` at one beyond the limit (what came before it counts), `OSError`."""
    with path.open(newline="", encoding=beginning(path, 4).encoding, errors="replace") as handle:
        number = 0
        while line := handle.readline(LIMIT + 1):
            number += 1
            if len(line) > LIMIT:
                raise BadInput([f"{path}:{number}: line: longer than {LIMIT} characters"])
            yield line
