"""Reads a file with a secret, as editors and shells of any system write it.

A byte-order mark is removed: it is invisible, and a secret that includes it would match nothing.
"""

from __future__ import annotations

import codecs
from pathlib import Path

_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def content(path: Path) -> bytes:
    """The content without a UTF-8 byte-order mark. Raises `OSError`, and `ValueError` for UTF-16 or binary data."""
    raw = path.read_bytes()
    if raw.startswith(_WIDE) or b"\0" in raw:
        raise ValueError("is UTF-16, or no text at all: save it as UTF-8")
    return raw.removeprefix(codecs.BOM_UTF8)
