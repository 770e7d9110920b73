"""Findings and actions from the watched run's store, as anybody could read them.

Nothing here knows the injected fault.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import Fp8watchError
from fp8watch.records import ActionRecord, Finding
from fp8watch.transport import endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Findings and actions of a run so far, in the order in which they were written."""

    findings: list[Finding] = field(default_factory=list)
    actions: list[ActionRecord] = field(default_factory=list)
    store: Path | None = None

    @property
    def applied(self) -> list[ActionRecord]:
        """Actions that were carried out and read back."""
        return [a for a in self.actions if a.applied_step is not None and a.readback != "pending"]

    @property
    def proposed(self) -> list[ActionRecord]:
        """Actions that were not carried out: observe, approve, refused, failed."""
        return [a for a in self.actions if a.applied_step is None]


def read_story(directory: Path, run: str) -> Story:
    """The story so far; empty while there is no store."""
    place = endpoint.read(directory, run)
    if place is None or not place.store or not Path(place.store).is_file():
        return Story()
    try:
        store = SqliteStore(place.store, read_only=True)
    except (sqlite3.Error, Fp8watchError, OSError):
        return Story()
    try:
        return Story(
            findings=list(store.read(run, Finding)),
            actions=list(store.read(run, ActionRecord)),
            store=Path(place.store),
        )
    except sqlite3.Error:  # busy, or its tables are just being created
        return Story()
    finally:
        store.close()


def has_ended(directory: Path, run: str) -> bool:
    """Whether the background process has recorded the run's end."""
    place = endpoint.read(directory, run)
    return place is None or place.state == "ended"
