"""The lines of a log, one at a time and never longer than `LIMIT`, so that a reader's memory is bounded.

UTF-8, with or without byte-order mark; invalid bytes become U+FFFD, which is in no number. UTF-16 and UTF-32 are
recognised by their mark. Line ends of all systems are accepted.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8watch.errors import BadInput

LIMIT = 1 << 20
"""Characters. The longest lines of the known kinds of logs have a few hundred."""

SHOWN = 60
"""Most characters of a cell or name that a message shows."""


def shown(text: str) -> str:
    """A cell or name for a message: one line, short, no control characters."""
    plain = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return plain if len(plain) <= SHOWN else f"{plain[:SHOWN]}... ({len(text)} characters)"


_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",  # before UTF-16, whose mark begins one of these
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The first bytes of a file, and the encoding of its text."""

    raw: bytes
    encoding: str

    @property
    def text(self) -> str:
        """The bytes as text; a character cut off at the end becomes U+FFFD."""
        return self.raw.decode(self.encoding, errors="replace")


def beginning(path: Path, most: int) -> Beginning:
    """The first bytes of a file, at most `most`. Raises `OSError`."""
    with path.open("rb") as handle:
        raw = handle.read(most)
    encoding = next((name for mark, name in _MARKS.items() if raw.startswith(mark)), "utf-8-sig")
    return Beginning(raw=raw, encoding=encoding)


def lines(path: Path) -> Iterator[str]:
    """Each line with its line end. Raises `OSError`, and `BadInput` at a line that is too long."""
    with path.open(newline="", encoding=beginning(path, 4).encoding, errors="replace") as handle:
        number = 0
        while line := handle.readline(LIMIT + 1):
            number += 1
            if len(line) > LIMIT:
                raise BadInput([f"{path}:{number}: line: longer than {LIMIT} characters"])
            yield line
