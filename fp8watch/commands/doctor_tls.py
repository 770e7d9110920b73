"""What `fp8watch doctor` says of certificates and the password of /metrics, and of the console's certificate.

Of what this machine's environment names; nothing where it names nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from fp8watch.commands.checks import Check, problem
from fp8watch.errors import BadInput
from fp8watch.security import certificates, validity
from fp8watch.security.metrics_access import MetricsAccess
from fp8watch.settings import Settings


def checks(settings: Settings) -> list[Check]:
    """Whether what is configured can be served, and whether clients will accept it."""
    return [*_metrics(settings), *_console()]


def _metrics(settings: Settings) -> list[Check]:
    try:
        access = MetricsAccess.load(settings)
    except BadInput as error:
        return [problem("metrics access", line) for line in error.problems]
    found = []
    if access.credentials is not None:
        found.append(Check(name="metrics password", result="ok", detail=str(settings.metrics_password_file)))
    if access.tls_cert is not None and access.tls_key is not None:
        found += _dates("metrics certificate", access.tls_cert, access.tls_key, access.client_ca)
    return found


def _console() -> list[Check]:
    cert, key = (os.environ.get(f"FP8WATCH_CONSOLE_TLS_{part}") for part in ("CERT", "KEY"))
    if not cert or not key:
        return []
    name = "console certificate"
    faults = [problem(name, f"{fault.path}: {fault.reason}") for fault in certificates.faults(Path(cert), Path(key))]
    return faults or _dates(name, Path(cert), Path(key))


def _dates(name: str, cert: Path, key: Path, authority: Path | None = None) -> list[Check]:
    dates = validity.dates(cert, key, authority)
    faults = dates.faults(time.time())
    ends = min((item.ends_unix for _, item in dates.validities), default=None)
    detail = str(cert) if ends is None else f"{cert}, valid until {validity.date(ends)}"
    return [problem(name, fault) for fault in faults] or [Check(name=name, result="ok", detail=detail)]
