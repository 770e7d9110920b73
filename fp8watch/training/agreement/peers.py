"""What ranks tell each other outside of the step boundaries: a word from each, read by all, through the job's store.

For what happens once and may take long, such as a resume; also in a run whose policy only observes, where no group
for votes is made.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any


class PeersLost(Exception):
    """A rank did not say its word in time, or the store is gone."""


class Peers:
    """All ranks call `exchange` equally often and in the same order."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        """`store`: a `torch.distributed.Store` of our own name space."""
        self._store, self._rank, self._ranks = store, rank, ranks
        self._count = 0

    def exchange(self, word: str, seconds: float) -> list[str]:
        """Say a word and wait for those of all ranks, in their order. Raises `PeersLost`."""
        self._count += 1
        keys = [f"word/{self._count}/{rank}" for rank in range(self._ranks)]
        try:
            self._store.set(keys[self._rank], word)
            self._store.wait(keys, timedelta(seconds=seconds))
            return [self._store.get(key).decode() for key in keys]
        except Exception as error:  # what a store raises differs by kind and version of torch
            raise PeersLost(f"not all ranks answered within {seconds:g} s: {type(error).__name__}") from error
