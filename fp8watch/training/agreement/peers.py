"""Exchange of strings between ranks through the job's `torch.distributed.Store`, outside of step boundaries.

Used for rare, slow events such as a resume. It also works in a run whose policy only observes, which has no group for
votes.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fp8watch.checkpoints.bit_sums import LATEST
from fp8watch.training.agreement.start import Start

_c10d: Any = dist
"""The parts of torch without type hints."""


logger = logging.getLogger(__name__)

BEGIN_SECONDS = 120.0
"""How long a save that needs all ranks waits for them. A rank may check its losses for a while before it saves."""
IMPATIENT_SECONDS = 10.0
"""The same after a save that not all ranks reached."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.05
"""Pause between polls for a decision, which takes milliseconds when ranks save at the same step."""
_ALL = "all"
_NOT_ALL = "not all ranks reached this save"


class PeersLost(Exception):
    """A rank did not answer in time, or the store is gone."""


class Peers:
    """One rank's access. All ranks call `exchange` equally often and in the same order."""

    def __init__(self, store: Any, rank: int, ranks: int, start: Start | None = None) -> None:
        """`store`: a `torch.distributed.Store` with our prefix. `start`: for a store that outlives a restart; its name
        becomes part of the prefix at the first use."""
        self._store, self._rank, self._ranks = store, rank, ranks
        self._start = start
        self.algorithm = LATEST
        """See `fp8watch.checkpoints.together.Together`."""
        self._count = 0
        self._begin_seconds = BEGIN_SECONDS

    def all_begin(self, about: str, cannot: str) -> str:
        """See `fp8watch.checkpoints.together.Together`. The last rank to arrive decides for all, or the first that
        cannot begin or times out. Ranks that arrive later find the decision."""
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
        if said.startswith(_NOT_ALL):  # a missing rank may be missing again
            self._begin_seconds = IMPATIENT_SECONDS
        return said

    def decline(self, reason: str) -> None:
        """Publish that this rank saves no checkpoints. Raises nothing. Does nothing before the start has a name."""
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
        """Publish `word` and wait up to `seconds` for the words of all ranks, in rank order. Raises `PeersLost`."""
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
    """Whether `key` is set within `seconds`. Polls, because a blocking wait on a store keeps other threads of this
    process, torch's own included, from using it."""
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return True
