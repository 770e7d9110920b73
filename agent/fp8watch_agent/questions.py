"""What a run's training is told of actions that wait for a person: that one waits, and that nobody will do it any more.

An answer that lets it be done is not told here: the ranks log what they carry out. The controller writes a record at
every change of an action, so each question and each end is told once; a rank says a text only once too, also when it
is sent again by a process that was restarted.
"""

from __future__ import annotations

from collections import deque

from fp8watch import action_words
from fp8watch.records import ActionRecord, Stored

MAX_UNSAID = 64
"""Texts kept while no rank is connected."""


class Questions:
    """Reads a run's stored records; `take` gives the texts that are new."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._unsaid: deque[str] = deque(maxlen=MAX_UNSAID)

    def hear(self, record: Stored) -> None:
        """Note a question, or its end without a deed."""
        if not isinstance(record, ActionRecord) or (record.id, record.status) in self._told:
            return
        text = _text(record)
        if text:
            self._told.add((record.id, record.status))
            self._unsaid.append(text)

    def take(self) -> list[str]:
        """The texts since the last call, oldest first."""
        taken = list(self._unsaid)
        self._unsaid.clear()
        return taken


def _text(record: ActionRecord) -> str:
    """Empty: nothing that a person has to hear of. Only what has waited for a person has a step at which it expires."""
    step, name = record.decided_step, action_words.named(record.action, record.params)
    if record.status == "waiting":
        until = "" if record.expires_step is None else f" until step {record.expires_step}"
        return f"step {step}: {name} waits for a person{until}: fp8watch actions approve {record.id}"
    if record.expires_step is None or record.status not in {"expired", "refused"} or record.applied_step is not None:
        return ""
    ended = "has expired" if record.status == "expired" else "is refused"
    why = record.reason or action_words.state(record)
    return f"step {step}: {name} ({record.id}), which waited for a person, {ended}: {why}"
