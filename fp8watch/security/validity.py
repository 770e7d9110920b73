"""Validity periods of certificates: warns when clients will refuse what a server presents.

The server uses such a certificate all the same, as other exporters and web servers do: the scrape fails with a reason
(`up` is 0), and renewed files are loaded. Refusing to start would also stop the process's other work.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOON_SECONDS = 14 * 86400.0
"""Warn this long before expiry. Automatic renewal usually happens 30 days before."""
SOON_SHARE = 0.2
"""Warn only in this last part of the certificate's life, so that a certificate of one day is not always late."""
_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which `ssl` has no name."""
_MOST_TURNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """Validity period of one certificate, in Unix seconds."""

    name: str
    """What to call it in a message."""
    begins_unix: float
    ends_unix: float

    def fault(self, now_unix: float) -> str | None:
        """Why clients refuse it at that time or will soon; None: it is valid. The text changes only with the state."""
        if now_unix < self.begins_unix:
            return f"{self.name} is not valid before {date(self.begins_unix)}: it is refused until then"
        if now_unix >= self.ends_unix:
            return f"{self.name} has expired on {date(self.ends_unix)}: it is refused"
        if self.ends_unix - now_unix < min(SOON_SECONDS, SOON_SHARE * (self.ends_unix - self.begins_unix)):
            return f"{self.name} expires on {date(self.ends_unix)}: it is refused from then on"
        return None


class Unusable(Exception):
    """Clients refuse the certificate at any time."""


def of_server(cert: Path, key: Path) -> list[Validity]:
    """Validity of a server's certificate and of the chain in the same file.

    Call it for files without `certificates.faults`. Raises `Unusable` with the client's error, and `OSError`.
    """
    # Done by a handshake with a client that trusts exactly this certificate: `ssl` shows the dates of verified
    # certificates only.
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cert)
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    shown = _complete_handshake(client, server)
    between: list[dict[str, Any]] = [dict(item) for item in client.get_ca_certs() if item != shown]
    return [
        _validity(shown, "the certificate"),
        *(_validity(item, f"the certificate of its authority ({_common_name(item)})") for item in between),
    ]


def of_authorities(path: Path) -> list[Validity]:
    """Validity of the CAs in a file. Raises `OSError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(path)
    found: list[dict[str, Any]] = [dict(item) for item in context.get_ca_certs()]
    return [_validity(item, f"the authority ({_common_name(item)})") for item in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dates:
    """Validity of the files that a server uses, as they were when read."""

    validities: tuple[tuple[Path, Validity], ...] = ()
    remarks: tuple[str, ...] = ()
    """`file: reason` for files whose dates are unknown."""

    def faults(self, now_unix: float) -> list[str]:
        """`file: reason` for everything that is refused at that time or will be soon."""
        found = ((path, item.fault(now_unix)) for path, item in self.validities)
        return [*self.remarks, *(f"{path}: {fault}" for path, fault in found if fault is not None)]


def dates(cert: Path, key: Path, authority: Path | None = None) -> Dates:
    """Validity of a server's chain, and of the CA for client certificates."""
    validities: list[tuple[Path, Validity]] = []
    remarks = []
    try:
        validities += [(cert, item) for item in of_server(cert, key)]
    except Unusable as error:
        remarks.append(f"{cert}: clients refuse this certificate, whatever the date: {error}")
    except OSError as error:
        remarks.append(f"{cert}: its expiry date cannot be read: {error}")
    try:
        validities += [] if authority is None else [(authority, item) for item in of_authorities(authority)]
    except OSError as error:
        remarks.append(f"{authority}: its expiry date cannot be read: {error}")
    return Dates(validities=tuple(validities), remarks=tuple(remarks))


def _complete_handshake(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> dict[str, Any]:
    """The certificate that the client gets in a handshake in memory."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_MOST_TURNS):
        try:
            client.do_handshake()
            return dict(client.getpeercert() or {})
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            raise Unusable(error.verify_message) from error
        with contextlib.suppress(ssl.SSLWantReadError):
            server.do_handshake()
    raise ssl.SSLError(f"the TLS handshake did not finish in {_MOST_TURNS} rounds")


def _validity(shown: dict[str, Any], name: str) -> Validity:
    begins, ends = (ssl.cert_time_to_seconds(str(shown[field])) for field in ("notBefore", "notAfter"))
    return Validity(name=name, begins_unix=begins, ends_unix=ends)


def _common_name(shown: dict[str, Any]) -> str:
    parts = [pair for group in shown.get("subject", ()) for pair in group]
    return next((str(value) for name, value in parts if name == "commonName"), "no name")


def date(unix: float) -> str:
    """UTC date and time to the minute."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix))
