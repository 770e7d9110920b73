"""What leaves the controller and makes a rank do something: signed there, verified in the training process.

Start, term and sequence number, attempt and last step are under the signature: an old command, a command of another run
or of another start of this one, and one whose moment has passed are refused by the journal and the step boundary like
any other.
"""

from __future__ import annotations

import msgspec

from fp8watch.records import Command, LedgerUpdate
from fp8watch.security.canonical import is_signed, signed
from fp8watch.security.keyring import SIGNATURE_BYTES, KeyRing


class Signer:
    """The controller's side: everything that makes a rank do something leaves through here. No ring: unsigned."""

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
        """Part of what a controller remembers of a run, as it is left with others for its successor."""
        return data if self._ring is None else self._ring.sign(_memory(run, name, data)) + data

    def recalled(self, run: str, name: str, data: bytes) -> bytes:
        """The part back again. Raises `ValueError` when no controller has left it."""
        if self._ring is None:
            return data
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        if not self._ring.verify(_memory(run, name, body), signature):
            raise ValueError(f"the {name} of run {run} is not signed by a controller")
        return body


class Verifier:
    """The training process's side (and the agent's, before it passes anything on). No ring: everything is believed,
    which is right only where the sender is a process of the same user behind a private socket."""

    def __init__(self, ring: KeyRing | None) -> None:
        self.ring = self._ring = ring
        self.refused = 0
        """Records that were not signed by the controller."""
        self._newest: dict[tuple[str, str], int] = {}

    def command(self, command: Command) -> bool:
        """Whether the controller signed it. That it is not old is the journal's business (term and sequence)."""
        return self._counted(self._ring is None or is_signed(command, self._ring))

    def ledger(self, update: LedgerUpdate) -> bool:
        """Whether the controller signed it. An old one is genuine too, and comes again from an agent that has read its
        stream anew: see `is_news`."""
        return self._counted(self._ring is None or is_signed(update, self._ring))

    def is_news(self, update: LedgerUpdate) -> bool:
        """Whether the controller has said nothing of this checkpoint since, as far as was asked here. For a verdict
        that is genuine."""
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
