"""A name for this start of the job that all its ranks know and no earlier start had.

torchrun gives restarted ranks the store of those before them, with all that they wrote, and nothing tells the starts
apart: each node counts its own failures only (pytorch issue 135712). So the ranks find a name together. Each has a
number of its own that was never used before; rank 0 calls every number that it finds, those of ranks that are gone
included, and the ranks that live answer the call. When all have answered, rank 0's number is the name: whoever goes by
it was called by a rank that read its own fresh number.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.25
"""Between looks into the store: ranks attach at about the same time, or one of them is slow."""
HEED_SECONDS = 5.0
"""So long it is not believed that a rank only observes: an earlier start of it may have said so, and this one may be
about to say that it acts."""


class NotNamed(Exception):
    """Not all ranks were there in time, or one that only observes waits for nobody; the text says which."""


class Start:
    """What one rank does for it. `announce` waits for nobody; `name` waits for all and may be asked again."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        """`store`: a `torch.distributed.Store` of our own name space, the same in all starts."""
        self._store, self._rank, self._ranks = store, rank, ranks
        self._number = secrets.token_hex(16)
        self._called: dict[int, str] = {}
        """Of rank 0: the number by which each rank was called last."""
        self._missing = set(range(1, ranks))

    def announce(self, *, acts: bool) -> None:
        """Say that this rank is there. Raises what a store raises."""
        self._store.set(f"number/{self._rank}", self._number)
        if not acts:
            self._store.set("observer", f"{self._rank} {self._number}")

    def name(self, seconds: float, *, heeds_observers: bool = False) -> str:
        """The name. Raises `NotNamed`, and what a store raises.

        `heeds_observers`: give up when some rank is known to observe only, which does not wait to be called.
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
        """A rank of this start that observes; None: there is none, or the word of one is of an earlier start."""
        rank, _, number = (self._read("observer") or "").partition(" ")
        is_of_now = rank.isdecimal() and int(rank) < self._ranks and self._read(f"number/{rank}") == number
        return rank if is_of_now else None

    def _read(self, key: str) -> str | None:
        found: bytes | None = self._store.get(key) if self._store.check([key]) else None
        return None if found is None else found.decode()
