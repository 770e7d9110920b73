"""A file with a secret in it, as editors and shells of any system write one.

A byte-order mark is no part of a secret: it cannot be seen, and a key or name that began with it would fit nothing.
"""

from __future__ import annotations

import codecs
from pathlib import Path

_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def content(path: Path) -> bytes:
    """All of it without a mark of UTF-8. Raises `OSError`, and `ValueError` with the reason for what is UTF-16."""
    raw = path.read_bytes()
    if raw.startswith(_WIDE) or b"\0" in raw:
        raise ValueError("is UTF-16, or no text at all: save it as UTF-8")
    return raw.removeprefix(codecs.BOM_UTF8)
