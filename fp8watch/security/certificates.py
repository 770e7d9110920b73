"""Checks a certificate and its private key before a server uses them.

A server that loads them itself reports a fault later, or asks for the key's password on the terminal. Used by the
console and by the servers of /metrics.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Part = Literal["cert", "key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault in one of the two files."""

    part: Part
    path: Path
    reason: str


class _Protected(Exception):
    """The key has a password."""


def faults(cert: Path, key: Path) -> list[Fault]:
    """All faults of a certificate chain and its private key (PEM, without a password)."""
    return load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key)


def load(context: ssl.SSLContext, cert: Path, key: Path) -> list[Fault]:
    """Load them into a server's context. After a fault the context is unusable."""
    unread = [*_unread("cert", cert), *_unread("key", key)]
    if unread:
        return unread

    def refuse() -> str:
        raise _Protected

    try:
        context.load_cert_chain(cert, key, password=refuse)
    except _Protected:
        return [Fault(part="key", path=key, reason="it has a password, and nobody is there to give it")]
    except ssl.SSLError as error:
        return [Fault(part="cert", path=cert, reason=f"no certificate with the key {key}: {error.reason or error}")]
    except OSError as error:  # removed since it was checked
        return [Fault(part="cert", path=cert, reason=str(error.strerror))]
    return []


def _unread(part: Part, path: Path) -> list[Fault]:
    try:
        path.open("rb").close()
    except OSError as error:
        return [Fault(part=part, path=path, reason=str(error.strerror))]
    return []
