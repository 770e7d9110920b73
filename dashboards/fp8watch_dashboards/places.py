"""Where runs and their stores lie: `FP8WATCH_DIR/runs/<run>/endpoint.json` names the store of each run.

A store is opened for one query and closed again: Streamlit runs a script on whatever thread is free, and an
engine's connection belongs to the thread that made it. Nothing here creates a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fp8watch.controller.stores.base import Store
from fp8watch.controller.stores.sqlite import SqliteStore


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of `endpoint.json`; further keys are ignored."""

    store: str
    redis: str = ""
    metrics_url: str = ""
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """One run and the store that holds it."""

    run: str
    store: Path | None
    """None: the records are in the cluster's Redis (`endpoint.redis`), or its agent found no place to write and keeps
    the run in memory, where nobody else can read it."""
    endpoint: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The runs found under a folder, newest first, and what could not be read, by name."""

    places: list[RunPlace]
    problems: list[str]


@contextmanager
def open_store(path: Path) -> Iterator[Store]:
    """The store in the file `path`, closed at the end.

    Raises `FileNotFoundError` when there is none: opening would make an empty one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no store at {path}")
    with closing(SqliteStore(path, read_only=True)) as store:
        yield store


def find_runs(root: Path) -> Listing:
    """Every run under `root` that has a readable `endpoint.json`, newest folder first."""
    places: list[RunPlace] = []
    problems: list[str] = []
    found = [(path.stat().st_mtime, path) for path in root.glob("runs/*/endpoint.json")]
    for _, path in sorted(found, reverse=True):
        try:
            endpoint = msgspec.json.decode(path.read_bytes(), type=Endpoint)
        except (OSError, msgspec.DecodeError) as error:
            problems.append(f"{path}: {error}")
            continue
        # An absolute path stays as it is; joining an empty one would name the folder.
        store = root.resolve() / endpoint.store if endpoint.store else None
        places.append(RunPlace(run=path.parent.name, store=store, endpoint=endpoint))
    return Listing(places=places, problems=problems)
