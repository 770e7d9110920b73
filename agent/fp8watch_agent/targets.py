"""`targets.json` in FP8WATCH_DIR: the live metrics addresses in Prometheus' file_sd form.

Made anew from all endpoints whenever one comes or goes, under a file lock: several processes share the folder.
The run is a `__meta_` label: a plain `run` would push the metrics' own aside.
"""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from fp8watch.atomic_file import replace_file
from fp8watch.transport import endpoint as endpoints
from fp8watch.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)


def announce(directory: Path, endpoint: Endpoint) -> bool:
    """Write a run's endpoint and bring `targets.json` up to date; False: it cannot be written, which is logged."""
    try:
        endpoints.write(directory, endpoint)
        refresh(directory)
    except OSError as error:
        logger.warning("endpoint of run %s cannot be written: %s", endpoint.run, error)
        return False
    return True


def _scheme(url: str) -> dict[str, str]:
    """How Prometheus is told that a target speaks https; http is what it takes for granted."""
    return {"__scheme__": "https"} if urlsplit(url).scheme == "https" else {}


def refresh(directory: Path) -> None:
    """Bring `targets.json` up to date. Raises `OSError` when the folder cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".targets.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # file systems without locks: the last writer wins
            logger.debug("no lock on %s: %s", lock.name, error)
        groups = [
            {
                "targets": [urlsplit(e.metrics_url).netloc],
                "labels": {"__meta_fp8watch_run": e.run, **_scheme(e.metrics_url)},
            }
            for e in endpoints.read_all(directory)
            if e.metrics_url and e.state == "live" and not endpoints.is_gone(e)
        ]
        content = msgspec.json.format(msgspec.json.encode(groups)) + b"\n"
        replace_file(directory / "targets.json", content, durable=False, mode=endpoints.MODE)
