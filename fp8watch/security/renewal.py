"""A server's certificate while it serves: renewed files are taken up, and one that ends or is about to is said.

Whoever renews certificates replaces files (certbot, cert-manager through a mounted secret) and expects a server to
notice, as exporters do that read them at each handshake. Used by `MetricsAccess`.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from fp8watch.security import certificates, validity

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""At most that often the files are looked at; scrapes come every ten seconds or so."""
_Stamp = tuple[tuple[int, int, int], ...]


class Renewal:
    """Has a listening socket's context show the newest certificate; `look` belongs before each new connection, on one
    thread.

    A renewed one gets a context of its own, for which connections leave the first one in the middle of their handshake:
    so a pair of files that was replaced half-way spoils none that is in use.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        cert: Path,
        key: Path,
        authority: Path | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`context` holds what the files held just now. `authority`: whose certificates clients have to show."""
        self._asks_clients = context.verify_mode
        self._cert, self._key, self._authority = cert, key, authority
        self._newest: ssl.SSLContext | None = None
        """None: the first one still holds."""
        context.sni_callback = self._show
        self._clock = clock
        self._stamp = self._stamped()
        self._dates = validity.dates(cert, key, authority)
        self._due = 0.0
        self._said: set[str] = set()
        self._tell()

    def look(self) -> None:
        """Take up new files, and say what is wrong with the dates of those in use; raises nothing."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        try:
            stamp = self._stamped()
            if stamp != self._stamp:
                self._stamp = stamp
                self._take()
            self._tell()
        except Exception:
            logger.warning("the certificate %s could not be looked after", self._cert, exc_info=True)

    def _take(self) -> None:
        renewed = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        wrong = [f"{fault.path}: {fault.reason}" for fault in certificates.load(renewed, self._cert, self._key)]
        if self._authority is not None:
            renewed.verify_mode = self._asks_clients
            try:
                renewed.load_verify_locations(self._authority)
            except OSError as error:
                wrong.append(f"{self._authority}: {error}")
        for reason in wrong:  # perhaps one of the files has been written and another not yet
            logger.warning("%s: the certificate from before stays in use", reason)
        if not wrong:
            self._newest = renewed
            self._dates = validity.dates(self._cert, self._key, self._authority)
            logger.info("the certificate of %s is in use as it is now", self._cert)

    def _show(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        """See `ssl.SSLContext.sni_callback`, which is called without a name too."""
        if self._newest is not None:
            connection.context = self._newest

    def _tell(self) -> None:
        faults = self._dates.faults(self._clock())
        for fault in faults:
            if fault not in self._said:
                logger.warning("%s", fault)
        self._said = set(faults)

    def _stamped(self) -> _Stamp:
        """What changes with the files' content; a file that is not there for a moment has none."""
        found = []
        for path in (self._cert, self._key, self._authority or self._cert):
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)
