"""Reloads a server's certificate when its files change, and warns of one that expires or has expired.

Tools that renew certificates replace files (certbot; cert-manager through a mounted secret) and expect servers to
notice. Used by `MetricsAccess`.
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
"""Minimum time between two checks of the files. Scrapes come about every 10 s."""
_Stamp = tuple[tuple[int, int, int], ...]


class Renewal:
    """Makes a listening socket use the newest certificate. Call `look` before each new connection, on one thread.

    A renewed certificate gets its own context. Connections switch to it during the handshake, so a half-replaced pair
    of files does not break the context in use.
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
        """`context` has the files loaded. `authority`: the CA for client certificates."""
        self._asks_clients = context.verify_mode
        self._cert, self._key, self._authority = cert, key, authority
        self._newest: ssl.SSLContext | None = None
        """None: the first context is still in use."""
        context.sni_callback = self._show
        self._clock = clock
        self._stamp = self._stamped()
        self._dates = validity.dates(cert, key, authority)
        self._due = 0.0
        self._said: set[str] = set()
        self._tell()

    def look(self) -> None:
        """Load changed files, and log problems with the dates of those in use. Raises nothing."""
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
        for reason in wrong:  # perhaps only one of the files has been written so far
            logger.warning("%s: the certificate from before stays in use", reason)
        if not wrong:
            self._newest = renewed
            self._dates = validity.dates(self._cert, self._key, self._authority)
            logger.info("the certificate of %s is in use as it is now", self._cert)

    def _show(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        """See `ssl.SSLContext.sni_callback`, which is also called without a name."""
        if self._newest is not None:
            connection.context = self._newest

    def _tell(self) -> None:
        faults = self._dates.faults(self._clock())
        for fault in faults:
            if fault not in self._said:
                logger.warning("%s", fault)
        self._said = set(faults)

    def _stamped(self) -> _Stamp:
        """Modification time, inode and size of the files; zeros for a missing one."""
        found = []
        for path in (self._cert, self._key, self._authority or self._cert):
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)
