"""The store of the embedded mode: one SQLite file in WAL mode, written by the agent, read by console and command line.

Each row is a record as msgpack, with the few columns it is selected by. Retention keeps the frames of the newest steps
and those around incidents, and drops older ones. Decisions, findings, checkpoints, layouts and run records are never
dropped.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from fp8watch import wire
from fp8watch.controller.identity import KINDS, key_of, step_of
from fp8watch.controller.stores.base import Approval, R, unpack_approval
from fp8watch.errors import BadInput, WireError
from fp8watch.records import RunRecord, StepFrame, Stored

SCHEMA_VERSION = 1
BUSY_TIMEOUT_MS = 2000
INCIDENT_MARGIN_STEPS = 256
"""Steps before and after a finding or action whose frames are kept."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, kind TEXT NOT NULL, key TEXT, step INTEGER, body BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS records_key ON records (run, kind, key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS records_step ON records (run, kind, step);
CREATE TABLE IF NOT EXISTS frames (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL,
    step INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (run, step, attempt, rank));
CREATE TABLE IF NOT EXISTS approvals (
    run TEXT NOT NULL, action_id TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (run, action_id));
"""


class SqliteStore:
    """A store in one file. The folder of `path` is created if necessary.

    `read_only` opens an existing file and never writes to it (for a reader of a live store). Raises `BadInput` for a
    file of a newer schema, `sqlite3.Error` or `OSError` if it cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        read_only: bool = False,
        full_steps: int = 4096,
        limit_bytes: int = 2 * 1024**3,
    ) -> None:
        self.path = Path(path)
        self._full_steps = full_steps
        self._limit_bytes = limit_bytes
        if read_only:
            self._db = self._open_to_read()
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
            )
        try:
            self._prepare(read_only=read_only)
        except BaseException:
            self._db.close()
            raise

    def _open_to_read(self) -> sqlite3.Connection:
        """A reader needs the index of the WAL next to the file. Without write permission it cannot be created, but it
        is not needed either if the WAL is empty, which means that the run has ended."""
        uri = f"{self.path.resolve().as_uri()}?mode=ro"
        database = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None)
        try:
            database.execute("PRAGMA user_version")
        except sqlite3.OperationalError:
            database.close()
            log = Path(f"{self.path}-wal")
            if log.exists() and log.stat().st_size > 0:
                raise
            database = sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
        return database

    def _prepare(self, *, read_only: bool) -> None:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            raise BadInput([f"{self.path}:1: store: schema {version} is newer than {SCHEMA_VERSION}, which this reads"])
        if read_only:
            return
        self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        self._db.execute("PRAGMA journal_mode=WAL")
        # NORMAL in WAL mode: a power cut may lose the last transactions, but corrupts nothing; a kill loses none.
        self._db.execute("PRAGMA synchronous=NORMAL")
        if version < SCHEMA_VERSION:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first. Damaged records are skipped."""
        rows = self._db.execute("SELECT body FROM records WHERE kind = 'run' ORDER BY id").fetchall()
        found = []
        for (body,) in rows:
            with contextlib.suppress(WireError):
                record = wire.unpack_stored(body)
                if isinstance(record, RunRecord):
                    found.append(record)
        return found

    def append(self, run: str, records: Iterable[Stored]) -> None:
        """Add records in one transaction. Raises `sqlite3.Error` (disk full, locked), and then nothing is written."""
        with self._transaction():
            for record in records:
                if isinstance(record, StepFrame):
                    self._db.execute(
                        "INSERT OR REPLACE INTO frames (run, attempt, rank, step, body) VALUES (?, ?, ?, ?, ?)",
                        (run, record.attempt, record.rank, record.step, wire.pack(record)),
                    )
                    continue
                # An update in place keeps the row's id and so the order of first writing.
                self._db.execute(
                    "INSERT INTO records (run, kind, key, step, body) VALUES (?, ?, ?, ?, ?)"
                    " ON CONFLICT (run, kind, key) WHERE key IS NOT NULL"
                    " DO UPDATE SET step = excluded.step, body = excluded.body",
                    (run, KINDS[type(record)], key_of(record), step_of(record), wire.pack(record)),
                )

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """Records of one kind; frames of all attempts in the order of writing. Damaged records are skipped."""
        limit = last_step if last_step is not None else 2**62
        if kind is StepFrame:
            query = "SELECT body FROM frames WHERE run = ? AND step BETWEEN ? AND ? ORDER BY id"
            rows = self._db.execute(query, (run, first_step, limit))
        else:
            query = (
                "SELECT body FROM records WHERE run = ? AND kind = ?"
                " AND (step IS NULL OR step BETWEEN ? AND ?) ORDER BY id"
            )
            rows = self._db.execute(query, (run, KINDS[kind], first_step, limit))
        while chunk := rows.fetchmany(256):
            for (body,) in chunk:
                try:
                    record = wire.unpack_stored(body)
                except WireError:
                    continue
                if isinstance(record, kind):
                    yield record

    def approve(self, approval: Approval) -> None:
        """Add a verdict, in a short transaction of its own: the agent writes to the same file."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO approvals (run, action_id, body) VALUES (?, ?, ?)",
                (approval.run, approval.action_id, wire.pack(approval)),
            )

    def approvals(self, run: str) -> list[Approval]:
        """The newest verdict on every action that has one. Unreadable verdicts are skipped."""
        rows = self._db.execute("SELECT body FROM approvals WHERE run = ?", (run,)).fetchall()
        found = []
        for (body,) in rows:
            with contextlib.suppress(WireError):
                found.append(unpack_approval(body))
        return found

    def size_bytes(self) -> int:
        """Bytes used by live pages."""
        pages, free, size = (
            int(self._db.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def prune(self, run: str) -> int:
        """Apply the retention rules. Returns the number of frames removed.

        Removes frames older than the newest `full_steps` unless they are near a finding or action; then, while the file
        is larger than `limit_bytes`, the oldest frames of all runs.
        """
        newest = self._db.execute("SELECT MAX(step) FROM frames WHERE run = ?", (run,)).fetchone()[0]
        if newest is None:
            return 0
        near = (
            "SELECT 1 FROM records r WHERE r.run = frames.run AND r.kind IN ('finding', 'action')"
            f" AND r.step BETWEEN frames.step - {INCIDENT_MARGIN_STEPS} AND frames.step + {INCIDENT_MARGIN_STEPS}"
        )
        with self._transaction():
            dropped = self._db.execute(
                f"DELETE FROM frames WHERE run = ? AND step <= ? AND NOT EXISTS ({near})",
                (run, int(newest) - self._full_steps),
            ).rowcount
        while (size := self.size_bytes()) > self._limit_bytes:
            count = int(self._db.execute("SELECT COUNT(*) FROM frames").fetchone()[0])
            if count == 0:
                break
            # Estimated from the average frame size; a few more rounds correct the error.
            too_many = max(1, count * (size - self._limit_bytes) // size)
            with self._transaction():
                self._db.execute(
                    "DELETE FROM frames WHERE id IN (SELECT id FROM frames ORDER BY id LIMIT ?)", (too_many,)
                )
            dropped += too_many
        if dropped:
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
        return int(dropped)

    def close(self) -> None:
        """Copy the WAL into the file, as far as readers allow, and close."""
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._db.close()
