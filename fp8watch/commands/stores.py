"""Finding and opening the stores of the runs under `FP8WATCH_DIR`, for reading while agents write to them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8watch.commands.output import not_found
from fp8watch.controller.store_sqlite import SqliteStore
from fp8watch.errors import BadInput
from fp8watch.records import RunRecord

DirOption = Annotated[
    Path | None, typer.Option("--dir", help="Folder that holds the runs; default: FP8WATCH_DIR, else .fp8watch.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A run, and the file that holds it."""

    record: RunRecord
    path: Path


def folder(directory: Path | None) -> Path:
    """The folder that is meant."""
    from fp8watch.settings import from_environment

    return (from_environment().dir if directory is None else directory).absolute()


def store_files(directory: Path) -> list[Path]:
    """Every store's file: where endpoints point to, and what lies in the runs' folders. Without doubles."""
    from fp8watch.transport import endpoint

    named = [Path(item.store) for item in endpoint.read_all(directory) if item.store]
    lying = [*directory.glob("*.sqlite"), *directory.glob("runs/*/*.sqlite")]
    return sorted({path.resolve() for path in [*named, *lying] if path.is_file()})


def runs(directory: Path) -> list[Found]:
    """All runs, oldest first; a file that is no store is said on stderr and left out."""
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
        raise not_found(f"no runs under {directory}")
    names = ", ".join(item.record.run for item in known[-8:]) or "none"
    raise not_found(f"no run {run!r} under {directory}; known: {names}")


@contextlib.contextmanager
def reading(found: Found) -> Iterator[SqliteStore]:
    """Its store, for reading."""
    with contextlib.closing(SqliteStore(found.path, read_only=True)) as store:
        yield store
