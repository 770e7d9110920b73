"""`targets.json` in FP8WATCH_DIR: the live metrics addresses in Prometheus's file_sd format.

It is updated whenever an endpoint changes, under a file lock because several processes share the folder. An update
reads only the endpoints that the file lists and the changed one: the folder may hold thousands of ended runs, and the
event loop waits for it. The run is a `__meta_` label, because a plain `run` would replace the metrics' own label.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from fp8watch.atomic_file import replace_file
from fp8watch.transport import endpoint as endpoints
from fp8watch.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)
_RUN = "__meta_fp8watch_run"


class _Group(msgspec.Struct):
    """The fields of a target group that are read back."""

    labels: dict[str, str]


def announce(directory: Path, endpoint: Endpoint) -> bool:
    """Write a run's endpoint and update `targets.json`. Returns False, and logs it, when that fails."""
    try:
        endpoints.write(directory, endpoint)
        refresh(directory, endpoint.run)
    except OSError as error:
        logger.warning("endpoint of run %s cannot be written: %s", endpoint.run, error)
        return False
    return True


def _scheme(url: str) -> dict[str, str]:
    """The label that makes Prometheus use https; its default is http."""
    return {"__scheme__": "https"} if urlsplit(url).scheme == "https" else {}


def refresh(directory: Path, run: str | None = None) -> None:
    """Update `targets.json` after a change of this run's endpoint, or of any with None. Raises `OSError` when the
    folder cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "targets.json"
    with (directory / ".targets.lock").open("ab") as lock:
        listed: set[str] | None = None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            listed = None if run is None else _listed(path)
        except OSError as error:  # file system without locks: concurrent writers may lose an entry, so read all
            logger.debug("no lock on %s: %s", lock.name, error)
        groups = [
            {
                "targets": [urlsplit(e.metrics_url).netloc],
                "labels": {_RUN: e.run, **_scheme(e.metrics_url)},
            }
            for e in (endpoints.read_all(directory) if listed is None else _read(directory, listed, run))
            if e.metrics_url and e.state == "live" and not endpoints.is_gone(e)
        ]
        content = msgspec.json.format(msgspec.json.encode(groups)) + b"\n"
        replace_file(path, content, durable=False, mode=endpoints.MODE)


def _listed(path: Path) -> set[str] | None:
    """The runs in the file; None if it cannot be read, so that all endpoints have to be."""
    try:
        groups = msgspec.json.decode(path.read_bytes(), type=list[_Group])
    except (OSError, msgspec.DecodeError):
        return None
    return {run for group in groups if (run := group.labels.get(_RUN)) is not None}


def _read(directory: Path, listed: set[str], changed: str | None) -> Iterator[Endpoint]:
    for run in sorted(listed if changed is None else listed | {changed}):
        if (endpoint := endpoints.read(directory, run)) is not None:
            yield endpoint
