"""A certificate and its key as files: what is wrong with them is said before anything listens.

Servers that load them themselves would say it later, or ask at the terminal for the password of a protected key.
Used by the console and by whoever serves /metrics.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Part = Literal["cert", "key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with one of the two files."""

    part: Part
    path: Path
    reason: str


class _Protected(Exception):
    """The key has a password."""


def faults(cert: Path, key: Path) -> Iterator[Fault]:
    """Everything that keeps a server from using a certificate chain and its private key (PEM, without a password)."""
    unread = [*_unread("cert", cert), *_unread("key", key)]
    if unread:
        yield from unread
        return

    def refuse() -> str:
        raise _Protected

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=refuse)
    except _Protected:
        yield Fault(part="key", path=key, reason="it has a password, and nobody is there to give it")
    except ssl.SSLError as error:
        yield Fault(part="cert", path=cert, reason=f"no certificate with the key {key}: {error.reason or error}")


def _unread(part: Part, path: Path) -> Iterator[Fault]:
    try:
        path.open("rb").close()
    except OSError as error:
        yield Fault(part=part, path=path, reason=str(error.strerror))
