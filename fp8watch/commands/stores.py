"""Finding and opening the stores of runs, for reading while agents and controllers write to them.

Stores are files under `FP8WATCH_DIR` and, where `FP8WATCH_REDIS_URL` is set, the cluster's Redis.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8watch.commands import values
from fp8watch.commands.output import not_found
from fp8watch.controller.stores.base import Store
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import BadInput, Unreachable
from fp8watch.records import RunRecord

WHERE = "FP8WATCH_DIR or --dir says where runs are kept"
_FOLDER = "Folder that holds the runs; default: FP8WATCH_DIR, else .fp8watch."
FolderOption = Annotated[
    Path | None, typer.Option("--dir", parser=values.folder, metavar="FOLDER", help=_FOLDER)
]  # fmt: skip
"""For a command that reads files only."""
DirOption = Annotated[
    Path | None,
    typer.Option(
        "--dir", parser=values.folder, metavar="FOLDER",
        help=f"{_FOLDER} FP8WATCH_REDIS_URL adds a cluster's runs.",
    ),
]  # fmt: skip
"""For a command that also reads the cluster's Redis, where `FP8WATCH_REDIS_URL` is set."""
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A run, and where it is kept: in a file, or in Redis (`redis_url` is set; `path` is then meaningless)."""

    record: RunRecord
    path: Path
    redis_url: str = ""

    @property
    def store(self) -> str:
        """Where it is kept, for display: the file, or the address of Redis without user and password."""
        if not self.redis_url:
            return str(self.path)
        from fp8watch.controller.cluster.redis_link import shown

        return shown(self.redis_url)


def folder(directory: Path | None) -> Path:
    """The given folder, or the default."""
    from fp8watch.settings import from_environment

    return (from_environment().dir if directory is None else directory).absolute()


def looked(directory: Path) -> str:
    """Where runs were looked for, for messages that there are none."""
    from fp8watch.settings import from_environment

    secret = from_environment().redis_url
    if secret is None:
        from fp8watch.transport import endpoint

        elsewhere = {item.redis for item in endpoint.read_all(directory) if item.redis}
        if elsewhere:
            return f"under {directory}, whose records are in {', '.join(sorted(elsewhere))}: set FP8WATCH_REDIS_URL"
        return f"under {directory}; for a cluster's runs set FP8WATCH_REDIS_URL"
    from fp8watch.controller.cluster.redis_link import shown

    return f"under {directory} or in {shown(secret.get_secret_value())}"


def store_files(directory: Path) -> list[Path]:
    """The file of every store, without duplicates: those that endpoints name, and those in the folders of runs."""
    from fp8watch.transport import endpoint

    named = [Path(item.store) for item in endpoint.read_all(directory) if item.store]
    lying = [*directory.glob("*.sqlite"), *directory.glob("runs/*/*.sqlite"), *_elsewhere(directory)]
    return sorted({path.resolve() for path in [*named, *lying] if path.is_file()})


def _elsewhere(directory: Path) -> list[Path]:
    """Stores in the state folders, of runs for which this folder could not be written or was full."""
    from fp8watch.transport import places

    mine: list[Path] = []
    for state in places.state_folders(directory):
        # The temporary folder is shared, and what another user put there is not read.
        if state.is_dir() and state.stat().st_uid == os.getuid():
            mine += state.glob("runs/*/*.sqlite")
    if mine and not os.access(directory, os.W_OK):
        folder = mine[0].parent.parent.parent
        typer.echo(f"{directory} cannot be written: records of its runs went to {folder}", err=True)
    return mine


def runs(directory: Path) -> list[Found]:
    """As `known`. Exits with 3 when Redis does not answer: a listing without its runs would look like one of all."""
    try:
        return known(directory)
    except Unreachable as error:
        raise not_found(f"{error} (FP8WATCH_REDIS_URL; without it only files are looked at)") from error


def known(directory: Path) -> list[Found]:
    """All runs, oldest first; a file that is not a store is reported on stderr and left out.

    Raises `Unreachable` when there is a Redis and it does not answer."""
    from fp8watch.transport import endpoint

    found = []
    for path in store_files(directory):
        try:
            with contextlib.closing(SqliteStore(path, read_only=True)) as store:
                for record in store.runs():
                    record = endpoint.as_it_is(record, endpoint.read(directory, record.run))
                    found.append(Found(record=record, path=path))
        except (sqlite3.Error, OSError, BadInput) as error:
            typer.echo(f"{path}: not readable as a store: {error}", err=True)
    found += _in_redis()
    return sorted(found, key=lambda item: item.record.started_unix)


def find(directory: Path, run: str | None) -> Found:
    """A run by name, or (None) the newest. Exits with 3 when there is none."""
    known = runs(directory)
    if run is None and known:
        return known[-1]
    for item in reversed(known):
        if item.record.run == run:
            return item
    if run is None:
        raise not_found(f"no runs {looked(directory)} ({WHERE})")
    names = ", ".join(item.record.run for item in known[-8:]) or "none"
    raise not_found(f"no run {run!r} {looked(directory)}; known: {names}")


@contextlib.contextmanager
def reading(found: Found) -> Iterator[Store]:
    """Its store, opened for reading. Exits with 3 when Redis does not answer any more."""
    try:
        with _answering(found), contextlib.closing(_open(found, read_only=True)) as store:
            yield store
    except Unreachable as error:
        raise not_found(str(error)) from error


@contextlib.contextmanager
def writing(found: Found) -> Iterator[Store]:
    """Its store, opened for writing a verdict. Raises `OSError` when it cannot be written."""
    try:
        with _answering(found), contextlib.closing(_open(found, read_only=False)) as store:
            yield store
    except (sqlite3.Error, Unreachable) as error:
        raise OSError(str(error)) from error


@contextlib.contextmanager
def _answering(found: Found) -> Iterator[None]:
    """Raises `Unreachable` for what its Redis does not do."""
    if not found.redis_url:
        yield
        return
    from fp8watch.controller.cluster.redis_link import RedisError

    try:
        yield
    except RedisError as error:
        raise _unreachable(found.redis_url, error) from error


def _unreachable(url: str, error: Exception) -> Unreachable:
    """In one line, which names the server and not what is in its address besides."""
    from fp8watch.controller.cluster.redis_link import reason_of, shown, words_of

    verb = "refuses" if reason_of(error) in ("denied", "other") else "cannot be reached"
    words = " ".join(words_of(error).split())
    return Unreachable([f"{shown(url)} {verb}: {words}"])


def _open(found: Found, *, read_only: bool) -> Store:
    if not found.redis_url:
        return SqliteStore(found.path, read_only=read_only)
    from fp8watch.controller.stores.redis import RedisStore

    return RedisStore(found.redis_url)


def _in_redis() -> list[Found]:
    from fp8watch.settings import from_environment

    secret = from_environment().redis_url
    if secret is None:
        return []
    from fp8watch.controller.cluster.redis_link import RedisError, shown
    from fp8watch.controller.stores.redis import RedisStore

    url = secret.get_secret_value()
    try:
        with contextlib.closing(RedisStore(url)) as store:
            return [Found(record=record, path=Path(shown(url)), redis_url=url) for record in store.runs()]
    except (RedisError, OSError) as error:
        raise _unreachable(url, error) from error


def disarm_in_redis(run: str | None, *, undo: bool) -> list[str]:
    """Tell the cluster's controller to disarm a run (None: all runs), or to rearm it; returns what was done."""
    from fp8watch.settings import from_environment

    secret = from_environment().redis_url
    if secret is None:
        return []
    from fp8watch.controller.cluster.redis_keys import DISARM, RunKeys
    from fp8watch.controller.cluster.redis_link import RedisError, connect

    url = secret.get_secret_value()
    key = DISARM if run is None else RunKeys(run).disarm
    try:
        link = connect(url)
        with contextlib.closing(link):
            if undo:
                link.client.delete(key)
            else:
                link.client.set(key, "1")
    except (RedisError, OSError) as error:
        why = "controllers are not told" if undo else "controllers go on; set FP8WATCH_DISARM=1 for the run"
        raise not_found(f"{_unreachable(url, error)}: {why}") from error
    return [f"{'armed again' if undo else 'disarmed'} for the controller at {link.shown}"]
