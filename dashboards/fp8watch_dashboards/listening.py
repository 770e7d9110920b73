"""Where the console listens and with what certificate: TLS wherever the address can be reached from another host.

The page has no login and shows names, losses and findings: in the clear it belongs on loopback. Everything is checked
before Streamlit is started, which would ask at the terminal for the password of a protected key.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from fp8watch.errors import BadInput
from fp8watch.security import certificates, validity


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """An address and the two PEM files of its certificate, or None for both."""

    host: str
    port: int
    tls_cert: Path | None = None
    """Certificate, followed by those between it and the authority."""
    tls_key: Path | None = None
    """Its private key, without a password."""
    allow_plain: bool = False
    """Whether an address other than loopback may be served in the clear."""

    @property
    def url(self) -> str:
        """What a person types."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_cert is None else 'https'}://{host}:{self.port}"

    def check(self) -> None:
        """Raises `BadInput` with everything that is wrong; nothing is listening yet."""
        problems = []
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "--tls-key" if self.tls_key is None else "--tls-cert"
            problems.append(f"command line:1: {missing}: a certificate and its key are given together")
        elif self.tls_cert is not None and self.tls_key is not None:
            problems += [
                f"command line:1: --tls-{fault.part}: {fault.path}: {fault.reason}"
                for fault in certificates.faults(self.tls_cert, self.tls_key)
            ]
        elif not self.allow_plain and not is_loopback(self.host):
            problems.append(
                f"command line:1: --host: {self.host or 'every address'} is not loopback: give --tls-cert and "
                "--tls-key, or --allow-plain where something before the console speaks TLS"
            )
        if problems:
            raise BadInput(problems)

    def remarks(self) -> list[str]:
        """What browsers will refuse, or will soon, though it can be served; for what `check` has passed."""
        if self.tls_cert is None or self.tls_key is None:
            return []
        return validity.dates(self.tls_cert, self.tls_key).faults(time.time())

    def options(self) -> dict[str, str]:
        """Streamlit's own options for it."""
        options = {"server.address": self.host, "server.port": str(self.port)}
        if self.tls_cert is not None:
            options |= {"server.sslCertFile": str(self.tls_cert), "server.sslKeyFile": str(self.tls_key)}
        return options


def is_loopback(host: str) -> bool:
    """Whether `host` means this machine alone. A name that does not resolve, and no name at all, do not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    if not host:
        return False
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)
