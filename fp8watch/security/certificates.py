"""A certificate and its key as files: what is wrong with them is said before anything listens.

Servers that load them themselves would say it later, or ask at the terminal for the password of a protected key.
Used by the console and by whoever serves /metrics.
"""

from __future__ import annotations

import ssl
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


def faults(cert: Path, key: Path) -> list[Fault]:
    """Everything that keeps a server from using a certificate chain and its private key (PEM, without a password)."""
    return load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key)


def load(context: ssl.SSLContext, cert: Path, key: Path) -> list[Fault]:
    """Put them into a server's context; what is wrong, after which the context is of no use."""
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
    except OSError as error:  # gone since it was looked for
        return [Fault(part="cert", path=cert, reason=str(error.strerror))]
    return []


def _unread(part: Part, path: Path) -> list[Fault]:
    try:
        path.open("rb").close()
    except OSError as error:
        return [Fault(part=part, path=path, reason=str(error.strerror))]
    return []
