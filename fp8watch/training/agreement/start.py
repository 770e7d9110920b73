"""A name for this start of the job: the same on all of its ranks, and never used by an earlier start.

torchrun gives restarted ranks the same TCPStore, with all earlier keys, and nothing distinguishes the starts: each node
counts only its own failures (pytorch issue 135712). So the ranks agree on a name. Each rank writes a new random number.
Rank 0 calls every number that it reads, also those of dead ranks, and live ranks answer the call. When all ranks have
answered, rank 0's number is the name. A rank that uses this name was called under its own new number, so both are of
the same start.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.25
"""Pause between polls of the store; doubles from the first to the longest."""
HEED_SECONDS = 5.0
"""An observing rank is ignored for this long: its entry may be of an earlier start, and the new one may act."""


class NotNamed(Exception):
    """Not all ranks attached in time, or a rank only observes and takes no part. The message says which."""


class Start:
    """One rank's side. `announce` does not wait; `name` waits for all ranks and may be called again."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        """`store`: a `torch.distributed.Store` with our prefix, the same in all starts."""
        self._store, self._rank, self._ranks = store, rank, ranks
        self._number = secrets.token_hex(16)
        self._called: dict[int, str] = {}
        """On rank 0: the number under which each rank was last called."""
        self._missing = set(range(1, ranks))

    def announce(self, *, acts: bool) -> None:
        """Publish this rank's number. Raises what a store raises."""
        self._store.set(f"number/{self._rank}", self._number)
        if not acts:
            self._store.set("observer", f"{self._rank} {self._number}")

    def name(self, seconds: float, *, heeds_observers: bool = False) -> str:
        """Wait up to `seconds` for the name. Raises `NotNamed`, and what a store raises.

        `heeds_observers`: give up early when a rank only observes, because such a rank answers no call.
        """
        began = time.monotonic()
        deadline, heeds_from = began + seconds, began + min(HEED_SECONDS, seconds)
        pause = FIRST_PAUSE_SECONDS
        while True:
            found = self._call() if self._rank == 0 else self._answer()
            if found is not None:
                return found
            observer = self._observer() if heeds_observers and time.monotonic() >= heeds_from else None
            if observer is not None:
                raise NotNamed(f"several ranks: the policy of rank {observer} only observes")
            if time.monotonic() > deadline:
                raise NotNamed(f"several ranks: not all of them attached within {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _call(self) -> str | None:
        for rank in sorted(self._missing):
            number = self._read(f"number/{rank}")
            if number is not None and number != self._called.get(rank):
                self._called[rank] = number
                self._store.set(f"call/{number}", self._number)
            if self._read(f"here/{self._number}/{rank}") is not None:
                self._missing.discard(rank)
        if self._missing:
            return None
        self._store.set(f"all/{self._number}", "")
        return self._number

    def _answer(self) -> str | None:
        name = self._read(f"call/{self._number}")
        if name is None:
            return None
        self._store.set(f"here/{name}/{self._rank}", "")
        return name if self._read(f"all/{name}") is not None else None

    def _observer(self) -> str | None:
        """A rank of this start that only observes; None: there is none, or the entry is of an earlier start."""
        rank, _, number = (self._read("observer") or "").partition(" ")
        is_of_now = rank.isdecimal() and int(rank) < self._ranks and self._read(f"number/{rank}") == number
        return rank if is_of_now else None

    def _read(self, key: str) -> str | None:
        found: bytes | None = self._store.get(key) if self._store.check([key]) else None
        return None if found is None else found.decode()
