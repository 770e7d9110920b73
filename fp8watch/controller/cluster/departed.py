"""Lets go of what is counted by run, a while after the run was last decided for here.

The counts themselves are kept where they arise, and know nothing of when a run is over. Looked at by the exporter
whenever a run begins or ends and at every scrape, on either thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping, Set
from typing import Any

Counts = MutableMapping[Any, Any]
"""By run, or by a tuple that begins with it."""


class Departed:
    """`most`: runs kept at once; those decided for count, and are never let go. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], *, ttl_seconds: float, most: int) -> None:
        self._clock = clock
        self._ttl_seconds = ttl_seconds
        self._most = most
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        """Run that is no longer decided for -> since when; the longest first."""

    def look(self, following: Set[str], counts: Iterable[Counts]) -> None:
        """Remove from `counts` the runs that have been gone for too long, and the longest gone where there are too
        many. `following`: the runs that are decided for now."""
        counts = list(counts)
        with self._lock:
            now = self._clock()
            held = {_run(key) for by_run in counts for key in list(by_run)}
            for run in self._since.keys() - (held - following):
                del self._since[run]
            for run in sorted(held - following - self._since.keys()):
                self._since[run] = now
            too_many = len(held | following) - self._most
            gone = {
                run
                for number, (run, since) in enumerate(self._since.items())
                if now - since > self._ttl_seconds or number < too_many
            }
            for run in gone:
                del self._since[run]
        for by_run in counts if gone else ():
            for key in list(by_run):
                if _run(key) in gone:
                    by_run.pop(key, None)


def _run(key: Any) -> str:
    return str(key if isinstance(key, str) else key[0])
