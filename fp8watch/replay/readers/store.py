"""Runs that fp8watch itself recorded, in a store file."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from fp8watch.controller.merge import Merger
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.records import Layout, RunRecord, StepFrame
from fp8watch.replay.recording import Facts, Recording, Seen
from fp8watch.replay.reenact import Reenactment, has_journal

MAGIC = b"SQLite format 3\x00"


def is_store(path: Path) -> bool:
    """Whether the file is an SQLite database."""
    with path.open("rb") as handle:
        return handle.read(len(MAGIC)) == MAGIC


def read(path: Path) -> list[Recording]:
    """Every run in a store file. Raises `BadInput` if it is not a store of fp8watch."""
    with _opened(path) as store:
        return [_recording(path, run, is_exact=has_journal(store, run.run)) for run in store.runs()]


def _recording(path: Path, run: RunRecord, *, is_exact: bool) -> Recording:
    facts = Facts(warmup_steps=run.hello.warmup_steps, policy=run.hello.policy)
    return Recording(
        run=run.run, source="fp8watch", samples=_samples(path, run), may_be_filtered=False, facts=facts,
        steps=_steps(path, run.run, facts) if is_exact else None,
    )  # fmt: skip


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[SqliteStore]:
    try:
        with contextlib.closing(SqliteStore(path, read_only=True)) as store:
            yield store
    except sqlite3.Error as error:
        raise BadInput([f"{path}:1: store: {error}"]) from error


def _steps(path: Path, run: str, facts: Facts) -> Callable[[], Iterator[Seen]]:
    def steps() -> Iterator[Seen]:
        with _opened(path) as store:
            yield from Reenactment(store, run, facts).steps()

    return steps


def _samples(path: Path, run: RunRecord) -> Iterator[Sample]:
    """Samples from the frames alone, in the order in which they were written (for stores without a journal)."""
    with _opened(path) as store:
        layouts = sorted(store.read(run.run, Layout), key=lambda layout: layout.attempt)
        merger = Merger(num_ranks=max(1, run.hello.world_size))
        attempt: int | None = None
        for frame in store.read(run.run, StepFrame):
            if attempt is None or frame.attempt > attempt:
                yield from merger.flush()
                attempt = frame.attempt
                merger.restart(frame.step - 1)
                for layout in layouts:
                    if layout.attempt <= attempt:
                        merger.layout(layout)
            if frame.attempt == attempt:
                yield from merger.frame(frame)
        yield from merger.flush()
