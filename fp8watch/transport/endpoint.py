"""`runs/<run>/endpoint.json`: the addresses of a run's process, socket, metrics and store.

Written by the agent, read by the command line and the console. It stays after the run has ended, because it names the
store; `state` is then `ended`, and the addresses of socket and metrics are empty.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from fp8watch.atomic_file import replace_file
from fp8watch.records import RunRecord
from fp8watch.transport import places

MODE = 0o644
"""File mode of endpoints and targets: Prometheus and the console may run as other users."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `endpoint.json`."""

    run: str
    pid: int
    """Process that serves (or served) the run."""
    host: str
    socket: str
    metrics_url: str
    store: str
    """Absolute path of the SQLite file; empty when the store is in the process's memory only, or in `redis`."""
    redis: str = ""
    """Address of the Redis that holds the records, without user and password; empty for a store on one machine."""
    state: Literal["live", "ended"] = "live"
    started_unix: float = 0.0


def write(directory: Path, endpoint: Endpoint) -> None:
    """Write a run's endpoint under `directory`, atomically. Raises `OSError`."""
    path = places.endpoint_file(directory, endpoint.run)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(endpoint), indent=2) + b"\n"
    replace_file(path, content, durable=False, mode=MODE)  # not durable: the next process writes it again


def read(directory: Path, run: str) -> Endpoint | None:
    """A run's endpoint; None if it is missing or cannot be read."""
    return _read(places.endpoint_file(directory, run))


def read_all(directory: Path) -> Iterator[Endpoint]:
    """Every endpoint under `directory`, in the order of folder names."""
    for path in sorted(directory.glob("runs/*/endpoint.json")):
        endpoint = _read(path)
        if endpoint is not None:
            yield endpoint


def is_gone(endpoint: Endpoint) -> bool:
    """Whether the process is known to have died; on another host that is unknown."""
    if endpoint.host != socket.gethostname():
        return False
    try:
        os.kill(endpoint.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def as_it_is(record: RunRecord, endpoint: Endpoint | None) -> RunRecord:
    """The record, with state `lost` if the run's process died, because that could not record its own end."""
    if record.state != "running" or endpoint is None or not is_gone(endpoint):
        return record
    return msgspec.structs.replace(record, state="lost", reason="the process that watched it is gone")


def _read(path: Path) -> Endpoint | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Endpoint)
    except (OSError, msgspec.DecodeError):
        return None
