"""Signatures of commands and verdicts: made by the controller, verified in the training process.

Start, term, sequence number, attempt and last step are signed. So the journal and the step boundary can refuse an old
or expired command, and one for another run or another start.
"""

from __future__ import annotations

import msgspec

from fp8watch.records import Command, LedgerUpdate
from fp8watch.security.canonical import is_signed, signed
from fp8watch.security.keyring import SIGNATURE_BYTES, KeyRing


class Signer:
    """Used by the controller: signs everything that makes a rank act. Without a ring nothing is signed."""

    def __init__(self, ring: KeyRing | None) -> None:
        self._ring = ring

    @property
    def is_signing(self) -> bool:
        """Whether there is a key."""
        return self._ring is not None

    def command(self, command: Command) -> Command:
        """The command with its signature."""
        return command if self._ring is None else signed(command, self._ring)

    def ledger(self, update: LedgerUpdate) -> LedgerUpdate:
        """The verdict with its signature."""
        return update if self._ring is None else signed(update, self._ring)

    def memory(self, run: str, name: str, data: bytes) -> bytes:
        """Sign a part of the controller's state of a run, which is stored outside for the next controller."""
        return data if self._ring is None else self._ring.sign(_memory(run, name, data)) + data

    def recalled(self, run: str, name: str, data: bytes) -> bytes:
        """Verify and return such a part. Raises `ValueError` when no controller signed it."""
        if self._ring is None:
            return data
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        if not self._ring.verify(_memory(run, name, body), signature):
            raise ValueError(f"the {name} of run {run} is not signed by a controller")
        return body


class Verifier:
    """Used by the training process, and by the agent before it forwards anything. Without a ring everything is
    accepted, which is right only if the sender is a process of the same user behind a private socket."""

    def __init__(self, ring: KeyRing | None) -> None:
        self.ring = self._ring = ring
        self.refused = 0
        """Number of records that the controller had not signed."""
        self._newest: dict[tuple[str, str], int] = {}

    def command(self, command: Command) -> bool:
        """Whether the controller signed it. The journal checks its age (term and sequence number)."""
        return self._counted(self._ring is None or is_signed(command, self._ring))

    def ledger(self, update: LedgerUpdate) -> bool:
        """Whether the controller signed it. An old verdict is genuine too, and an agent that reads its stream again
        sends it again: see `is_news`."""
        return self._counted(self._ring is None or is_signed(update, self._ring))

    def is_news(self, update: LedgerUpdate) -> bool:
        """Whether this genuine verdict is the newest seen here for its checkpoint. Without a ring always True."""
        if self._ring is None:
            return True
        key = (update.run, update.checkpoint)
        is_news = update.issued_ns >= self._newest.get(key, 0)
        if is_news:
            self._newest[key] = update.issued_ns
        return is_news

    def _counted(self, is_good: bool) -> bool:
        self.refused += not is_good
        return is_good


def _memory(run: str, name: str, data: bytes) -> bytes:
    return b"fp8watch memory 1 " + msgspec.msgpack.encode([run, name]) + data
