"""A rank's journal of commands begun and finished: JSON lines in `runs/<run>/journal-<rank>.jsonl`.

An entry is synced to disk before the command changes anything. A command that was begun but not finished when the
process died is reported as unknown and never retried. The journal is not part of checkpoints, so a restored checkpoint
does not make an old command new. It also keeps the attempt number, so that a restart never repeats
(run, attempt, rank, step).
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8watch.records import Command, Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A command that an earlier process began."""

    id: str
    verb: Verb
    step: int
    start: str = ""
    """The start of the run that the command was for; empty in entries of an earlier version."""


class Journal:
    """One rank's append-only journal. An absent file is an empty journal. The constructor does not raise `OSError`: see
    `unavailable`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"journal-{rank}.jsonl"
        self.unavailable: str | None = None
        """Why the journal cannot be written; None: it can be. No command is carried out without a journal."""
        self.term = 0
        self.sequence = 0
        self.last_attempt = -1
        self._done: set[tuple[str, str]] = set()
        self._begun: dict[tuple[str, str], Unfinished] = {}
        self._is_cut_short = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._read()
            with open(self.path, "ab") as file:
                if self._is_cut_short:
                    file.write(b"\n")
            self._is_cut_short = False
        except OSError as error:
            self.unavailable = f"journal {self.path} cannot be written: {error.strerror or error}"

    def _read(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        self._is_cut_short = bool(data) and not data.endswith(b"\n")
        for line in data.splitlines():
            try:
                entry = json.loads(line)
                self._take(entry)
            except (ValueError, KeyError, TypeError):
                continue  # cut short by a crash: the command was not carried out, or stays unfinished

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "attempt":
            self.last_attempt = max(self.last_attempt, int(entry["attempt"]))
            return
        key = (str(entry["id"]), str(entry["verb"]))
        if entry["event"] == "begin":
            self._begun[key] = Unfinished(
                id=entry["id"], verb=entry["verb"], step=int(entry["step"]), start=str(entry.get("start", ""))
            )  # fmt: skip
            self._advance(int(entry["term"]), int(entry["sequence"]))
        else:
            self._begun.pop(key, None)
            self._done.add(key)

    def _advance(self, term: int, sequence: int) -> None:
        self.term, self.sequence = max((self.term, self.sequence), (term, sequence))

    @property
    def unfinished(self) -> list[Unfinished]:
        """Commands that were begun and not finished."""
        return list(self._begun.values())

    def knows(self, command: Command) -> bool:
        """Whether this verb of this command was begun before."""
        key = (command.id, command.verb)
        return key in self._done or key in self._begun

    def attempt(self, attempt: int) -> None:
        """Record the start of an attempt. Raises `OSError`."""
        self.last_attempt = max(self.last_attempt, attempt)
        self._write({"event": "attempt", "attempt": attempt})

    def begin(self, command: Command, step: int) -> None:
        """Record a command before it is carried out; durable on return. Raises `OSError`."""
        entry = {
            "event": "begin", "id": command.id, "verb": command.verb, "action": command.action,
            "term": command.term, "sequence": command.sequence, "step": step, "start": command.start,
        }  # fmt: skip
        self._write(entry)
        self._take(entry)

    def finish(self, command: Command, status: str) -> None:
        """Record a command's final status. Raises `OSError`."""
        entry = {"event": "end", "id": command.id, "verb": command.verb, "status": status}
        self._take(entry)
        self._write(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        data = b"\n" * self._is_cut_short + json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        # Opened for each entry, because DataLoader workers would inherit a descriptor that stays open.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            try:
                # A write may be short, for example on a full disk; writing the rest then raises.
                while data:
                    written = os.write(descriptor, data)
                    if written <= 0:
                        raise OSError(errno.EIO, "nothing could be written")
                    data = data[written:]
                os.fsync(descriptor)
            except OSError:
                self._take_back(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        self._is_cut_short = False

    def _take_back(self, descriptor: int, size: int) -> None:
        """Remove a partly written entry, so that the next one starts on a new line."""
        try:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        except OSError:
            self._is_cut_short = True
