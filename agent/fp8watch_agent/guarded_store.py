"""A store that counts its failures instead of raising them: a full disk must not stop the agent."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator

from fp8watch.controller.stores.base import Approval, R, Store
from fp8watch.records import RunRecord, Stored

logger = logging.getLogger(__name__)
_FAILURES = (OSError, sqlite3.Error)


class GuardedStore:
    """Calls `on_error(run, reason)` for every failed read or write."""

    def __init__(self, store: Store, on_error: Callable[[str, str], None]) -> None:
        self._store = store
        self._on_error = on_error

    def runs(self) -> list[RunRecord]:
        """All runs; empty when the store cannot be read."""
        try:
            return self._store.runs()
        except _FAILURES as error:
            self._failed("", error)
            return []

    def append(self, run: str, records: Iterable[Stored]) -> None:
        """Store records, or count the failure."""
        try:
            self._store.append(run, records)
        except _FAILURES as error:
            self._failed(run, error)

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """Records of one kind; ends early when the store cannot be read."""
        try:
            yield from self._store.read(run, kind, first_step, last_step)
        except _FAILURES as error:
            self._failed(run, error)

    def approve(self, approval: Approval) -> None:
        """Store a verdict, or count the failure."""
        try:
            self._store.approve(approval)
        except _FAILURES as error:
            self._failed(approval.run, error)

    def approvals(self, run: str) -> list[Approval]:
        """Verdicts on waiting actions; empty when the store cannot be read."""
        try:
            return self._store.approvals(run)
        except _FAILURES as error:
            self._failed(run, error)
            return []

    def prune(self, run: str) -> int:
        """Apply retention; 0 when it fails."""
        try:
            return self._store.prune(run)
        except _FAILURES as error:
            self._failed(run, error)
            return 0

    def close(self) -> None:
        """Close the store."""
        try:
            self._store.close()
        except _FAILURES as error:
            logger.warning("closing the store failed: %s", error)

    def _failed(self, run: str, error: Exception) -> None:
        logger.debug("store failed for run %s", run, exc_info=error)
        self._on_error(run, str(error))
