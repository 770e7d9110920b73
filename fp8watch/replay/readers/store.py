"""Runs that fp8watch itself recorded: a store file, or a folder that holds some (`.fp8watch`, `runs/<run>`)."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fp8watch.controller.merge import Merger
from fp8watch.controller.store_sqlite import SqliteStore
from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.records import Layout, RunRecord, StepFrame
from fp8watch.replay.recording import Recording

MAGIC = b"SQLite format 3\x00"


def is_store(path: Path) -> bool:
    """Whether the file is an SQLite database."""
    with path.open("rb") as handle:
        return handle.read(len(MAGIC)) == MAGIC


def read(path: Path) -> list[Recording]:
    """Every run in a store file. Raises `BadInput` for a file that is no store of ours."""
    try:
        store = SqliteStore(path, read_only=True)
        with contextlib.closing(store):
            runs = store.runs()
    except sqlite3.Error as error:
        raise BadInput([f"{path}:1: store: {error}"]) from error
    return [
        Recording(run=run.run, source="fp8watch", samples=_samples(path, run), may_be_filtered=False) for run in runs
    ]


def _samples(path: Path, run: RunRecord) -> Iterator[Sample]:
    with contextlib.closing(SqliteStore(path, read_only=True)) as store:
        layouts = sorted(store.read(run.run, Layout), key=lambda layout: layout.attempt)
        frames = sorted(store.read(run.run, StepFrame), key=lambda frame: (frame.attempt, frame.step, frame.rank))
    merger = Merger(num_ranks=max(1, len({frame.rank for frame in frames})))
    attempt: int | None = None
    for frame in frames:
        if frame.attempt != attempt:
            attempt = frame.attempt
            merger.restart(frame.step - 1)
            for layout in layouts:
                if layout.attempt <= attempt:
                    merger.layout(layout)
        yield from merger.frame(frame)
    yield from merger.without(1)
