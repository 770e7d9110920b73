"""What ranks tell each other outside of the step boundaries: a word from each, read by all, through the job's store.

For what happens once and may take long, such as a resume; also in a run whose policy only observes, where no group
for votes is made.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fp8watch.training.agreement.start import Start

_c10d: Any = dist
"""What torch gives no types for."""


logger = logging.getLogger(__name__)

BEGIN_SECONDS = 120.0
"""What a save that needs all ranks waits for them: one may look at its losses for a while before it comes."""
IMPATIENT_SECONDS = 10.0
"""The same, once not all have come."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.05
"""Between looks for a decision, which is there in milliseconds where ranks save at one step."""
_ALL = "all"
_NOT_ALL = "not all ranks came to it"


class PeersLost(Exception):
    """A rank did not say its word in time, or the store is gone."""


class Peers:
    """All ranks call `exchange` equally often and in the same order."""

    def __init__(self, store: Any, rank: int, ranks: int, start: Start | None = None) -> None:
        """`store`: a `torch.distributed.Store` of our own name space. `start`: to be named before the first word,
        where the store is one of earlier starts too."""
        self._store, self._rank, self._ranks = store, rank, ranks
        self._start = start
        self._count = 0
        self._begin_seconds = BEGIN_SECONDS

    def all_begin(self, about: str, cannot: str) -> str:
        """See `fp8watch.checkpoints.together.Together`. The last to come, or the first that cannot or has waited in
        vain, decides for all: who comes later finds the decision."""
        seconds, verdict = self._begin_seconds, f"begin/{about}/verdict"
        try:
            store = self._named_store(seconds)
            if cannot:
                store.compare_set(verdict, "", f"rank {self._rank}: {cannot}")
            elif store.add(f"begin/{about}/ranks", 1) == self._ranks:
                store.compare_set(verdict, "", _ALL)
            if not _comes(store, verdict, seconds):
                store.compare_set(verdict, "", f"{_NOT_ALL} within {seconds:g} s")
            said: str = store.get(verdict).decode()
        except Exception as error:
            return f"rank {self._rank}: the job's store does not answer ({type(error).__name__})"
        if said == _ALL:
            self._begin_seconds = BEGIN_SECONDS
            return ""
        if said.startswith(_NOT_ALL):  # who did not come once may not come the next time
            self._begin_seconds = IMPATIENT_SECONDS
        return said

    def decline(self, reason: str) -> None:
        """This rank saves no checkpoints. Told at once, to whom it may concern; raises nothing."""
        try:
            if self._start is None:
                self._store.set("declined", f"rank {self._rank}: {reason}")
        except Exception as error:
            logger.debug("the others were not told: %s", reason, exc_info=error)

    def declined(self) -> str:
        """See `fp8watch.checkpoints.together.Together`."""
        try:
            known = self._start is None and self._store.check(["declined"])
            return self._store.get("declined").decode() if known else ""
        except Exception as error:
            logger.debug("whether a rank saves nothing is not known", exc_info=error)
            return ""

    def exchange(self, word: str, seconds: float) -> list[str]:
        """Say a word and wait for those of all ranks, in their order. Raises `PeersLost`."""
        self._count += 1
        keys = [f"word/{self._count}/{rank}" for rank in range(self._ranks)]
        try:
            store = self._named_store(seconds)
            store.set(keys[self._rank], word)
            store.wait(keys, timedelta(seconds=seconds))
            return [store.get(key).decode() for key in keys]
        except Exception as error:  # what a store raises differs by kind and version of torch
            raise PeersLost(f"not all ranks answered within {seconds:g} s: {type(error).__name__}") from error

    def _named_store(self, seconds: float) -> Any:
        if self._start is not None:
            self._store, self._start = _c10d.PrefixStore(self._start.name(seconds), self._store), None
        return self._store


def _comes(store: Any, key: str, seconds: float) -> bool:
    """Whether a key is set within that time. Looked for again and again: a store that is waited at answers no other
    thread of this process, and torch has threads that ask it."""
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return True
