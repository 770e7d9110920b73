"""Access control for /metrics: TLS, client certificates, and basic authentication. Each is optional.

Without them anybody who reaches the address can read /metrics. The default address is loopback. Used by agent and
controller; `prometheus_client` is the server.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8watch.errors import BadInput
from fp8watch.security import certificates, secret_file
from fp8watch.security.renewal import Renewal
from fp8watch.settings import Settings
from fp8watch.shared_reply import App, SharedReply

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0
"""Timeout of a silent client, handshake included. Prometheus's default scrape timeout is 10 s as well."""
MOST_CONNECTIONS = 128
"""Maximum number of open connections. Each takes a thread and a file descriptor, which the process also needs for ranks
and files. A few Prometheus servers need one each, for a short time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAccess:
    """What a client has to present. By default nothing."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    """CA that must have signed the client's certificate."""
    credentials: bytes | None = None
    """`name:password`."""

    @property
    def scheme(self) -> str:
        """Scheme of the URL."""
        return "http" if self.tls_cert is None else "https"

    @classmethod
    def load(cls, settings: Settings) -> MetricsAccess:
        """Load from the settings. Raises `BadInput` with all problems of settings and files."""
        cert, key, authority = settings.metrics_tls_cert, settings.metrics_tls_key, settings.metrics_client_ca
        problems = []
        if (cert is None) != (key is None):
            missing = "KEY" if key is None else "CERT"
            problems.append(f"environment:1: FP8WATCH_METRICS_TLS_{missing}: certificate and key are given together")
        elif cert is not None and key is not None:
            problems += _tls_problems(cert, key, authority)
        elif authority is not None:
            problems.append("environment:1: FP8WATCH_METRICS_CLIENT_CA: needs FP8WATCH_METRICS_TLS_CERT")
        credentials = None
        if settings.metrics_password_file is not None:
            try:
                credentials = _credentials(settings.metrics_password_file)
            except BadInput as error:
                problems += error.problems
        if problems:
            raise BadInput(problems)
        return cls(tls_cert=cert, tls_key=key, client_ca=authority, credentials=credentials)

    def serve(self, registry: Any, host: str, port: int) -> tuple[Any, Any]:
        """Start `prometheus_client`'s server; returns it and its thread. Raises `OSError` when it cannot bind the
        port."""
        import prometheus_client

        options: dict[str, Any] = {}
        if self.tls_cert is not None:
            options = {"certfile": str(self.tls_cert), "keyfile": str(self.tls_key),
                       "client_cafile": None if self.client_ca is None else str(self.client_ca),
                       "client_auth_required": self.client_ca is not None}  # fmt: skip
        first = registry if self.credentials is None else _NOTHING
        server, thread = prometheus_client.start_http_server(port, addr=host, registry=first, **options)
        made: Any = server
        if self.tls_cert is not None and self.tls_key is not None:
            # Else the accepting thread waits for each client's handshake, and for ever if it never comes.
            made.socket.do_handshake_on_connect = False
            _looked_after(made, Renewal(made.socket.context, self.tls_cert, self.tls_key, self.client_ca))
        made.RequestHandlerClass = type("Handler", (made.RequestHandlerClass,), {"timeout": REQUEST_SECONDS})
        made.handle_error = _refused
        _OldestFirst(made)
        app: App = SharedReply(prometheus_client.make_wsgi_app(registry))
        server.set_app(app if self.credentials is None else asking(app, self.credentials))
        return server, thread


def _looked_after(server: Any, renewal: Renewal) -> None:
    """Check the certificate before each connection, on the accepting thread."""
    accept = server.get_request

    def get_request() -> Any:
        renewal.look()
        return accept()

    server.get_request = get_request


class _Nothing:
    """The registry served until the app with authentication is in place: no metrics."""

    def collect(self) -> Iterable[Any]:
        return ()


_NOTHING: Any = _Nothing()


class _OldestFirst:
    """Limits a server's connections: a new one closes the oldest. So clients that send nothing, or one byte now and
    then, do not block those that read and leave."""

    def __init__(self, server: Any) -> None:
        self._open: dict[Any, None] = {}
        self._process, self._shutdown = server.process_request, server.shutdown_request
        server.process_request, server.shutdown_request = self.process_request, self.shutdown_request

    def process_request(self, request: Any, address: Any) -> None:
        """See `socketserver.BaseServer`. Runs on the accepting thread."""
        self._open[request] = None
        if len(self._open) > MOST_CONNECTIONS:
            with contextlib.suppress(OSError, StopIteration, RuntimeError):  # it has just closed itself
                oldest = next(iter(self._open))
                self._open.pop(oldest, None)
                # The plain socket: its thread may be in a TLS handshake, and then finds it closed.
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        self._process(request, address)

    def shutdown_request(self, request: Any) -> None:
        """See `socketserver.BaseServer`. Runs on the connection's thread."""
        self._open.pop(request, None)
        self._shutdown(request)


def _refused(request: Any, address: Any) -> None:
    """Log a failed request without a traceback: TLS clients may not trust us or not be trusted."""
    logger.debug("request of %s to /metrics failed", address, exc_info=True)


def asking(app: App, credentials: bytes) -> App:
    """`app` for clients that send `name:password`; 401 for others."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        kind, _, encoded = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
        try:
            given = base64.b64decode(encoded, validate=True) if kind.lower() == "basic" else b""
        except (binascii.Error, ValueError):
            given = b""
        if hmac.compare_digest(given, credentials):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="fp8watch"'), ("Content-Length", "0")])
        return [b""]

    return guarded


def _credentials(path: Path) -> bytes:
    try:
        line = secret_file.content(path).strip()
    except OSError as error:
        raise BadInput([f"{path}:1: FP8WATCH_METRICS_PASSWORD_FILE: {error.strerror}"]) from error
    except ValueError as error:
        raise BadInput([f"{path}:1: FP8WATCH_METRICS_PASSWORD_FILE: {error}"]) from error
    name, colon, password = line.partition(b":")
    if not name or not colon or not password or len(line.splitlines()) > 1:
        raise BadInput([f"{path}:1: FP8WATCH_METRICS_PASSWORD_FILE: holds no line name:password"])
    return line


def _tls_problems(cert: Path, key: Path, authority: Path | None) -> list[str]:
    problems = [
        f"{fault.path}:1: FP8WATCH_METRICS_TLS_{fault.part.upper()}: {fault.reason}"
        for fault in certificates.faults(cert, key)
    ]
    if authority is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(authority)
        except OSError as error:
            problems.append(f"{authority}:1: FP8WATCH_METRICS_CLIENT_CA: {error}")
    return problems
