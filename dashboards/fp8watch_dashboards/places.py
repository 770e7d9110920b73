"""Where runs and their stores are: `FP8WATCH_DIR/runs/<run>/endpoint.json` names the store of each run.

A store is opened for one query and closed again, because Streamlit runs a script on any free thread, while a database
connection belongs to the thread that made it. Nothing here creates a file.
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
    """The keys of `endpoint.json` that the console needs (all of them: `fp8watch.transport.endpoint.Endpoint`)."""

    store: str
    redis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """A run and its store."""

    run: str
    store: Path | None
    """None: the records are in the cluster's Redis (`endpoint.redis`), or the agent found no place to write and keeps
    them in its memory, where nobody else can read them."""
    endpoint: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The runs found under a folder, newest first, and a message for each file that could not be read."""

    places: list[RunPlace]
    problems: list[str]


@contextmanager
def open_store(path: Path) -> Iterator[Store]:
    """Open the store in the file `path`, and close it at the end.

    Raises `FileNotFoundError` if there is no such file: SQLite would create an empty one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no store at {path}")
    with closing(SqliteStore(path, read_only=True)) as store:
        yield store


def find_runs(root: Path) -> Listing:
    """Every run under `root` with a readable `endpoint.json`, the most recently written one first."""
    places: list[RunPlace] = []
    problems: list[str] = []
    found = [(path.stat().st_mtime, path) for path in root.glob("runs/*/endpoint.json")]
    for _, path in sorted(found, reverse=True):
        try:
            endpoint = msgspec.json.decode(path.read_bytes(), type=Endpoint)
        except (OSError, msgspec.DecodeError) as error:
            problems.append(f"{path}: {error}")
            continue
        # Joining keeps an absolute path as it is; an empty one would become the folder itself.
        store = root.resolve() / endpoint.store if endpoint.store else None
        places.append(RunPlace(run=path.parent.name, store=store, endpoint=endpoint))
    return Listing(places=places, problems=problems)
