"""`targets.json` in FP8WATCH_DIR: the live metrics addresses in Prometheus' file_sd form.

Brought up to date whenever an endpoint comes or goes, under a file lock: several processes share the folder. What it
lists already tells which other endpoints to look at: the folder may hold thousands of runs that ended long ago, and
this is done between the messages of ranks. The run is a `__meta_` label: a plain `run` would push the metrics' own
aside.
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
    """An entry of the file, as far as it is read again."""

    labels: dict[str, str]


def announce(directory: Path, endpoint: Endpoint) -> bool:
    """Write a run's endpoint and bring `targets.json` up to date; False: it cannot be written, which is logged."""
    try:
        endpoints.write(directory, endpoint)
        refresh(directory, endpoint.run)
    except OSError as error:
        logger.warning("endpoint of run %s cannot be written: %s", endpoint.run, error)
        return False
    return True


def _scheme(url: str) -> dict[str, str]:
    """How Prometheus is told that a target speaks https; http is what it takes for granted."""
    return {"__scheme__": "https"} if urlsplit(url).scheme == "https" else {}


def refresh(directory: Path, run: str | None = None) -> None:
    """Bring `targets.json` up to date after a change of this run's endpoint; None: of any. Raises `OSError` when the
    folder cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "targets.json"
    with (directory / ".targets.lock").open("ab") as lock:
        listed: set[str] | None = None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            listed = None if run is None else _listed(path)
        except OSError as error:  # file systems without locks: others write at the same time, so the list may lack some
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
    """The runs in the file; None when there is none that can be read, and everything has to be looked at."""
    try:
        groups = msgspec.json.decode(path.read_bytes(), type=list[_Group])
    except (OSError, msgspec.DecodeError):
        return None
    return {run for group in groups if (run := group.labels.get(_RUN)) is not None}


def _read(directory: Path, listed: set[str], changed: str | None) -> Iterator[Endpoint]:
    for run in sorted(listed if changed is None else listed | {changed}):
        if (endpoint := endpoints.read(directory, run)) is not None:
            yield endpoint
