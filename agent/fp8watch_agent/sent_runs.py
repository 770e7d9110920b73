"""The uplink thread's record of each run on this node: what it has sent and may have to send again.

Only that thread changes it, in the order of the queue. Other threads put `RunOver`, `AnnounceAgain` and `TermSeen`
into the queue: applied at once, `RunOver` could precede the run's hello, and `AnnounceAgain` could repeat a hello after
its goodbye, so that the run would never end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from fp8watch.records import Hello, Layout
from fp8watch_agent.trim import Ages


@dataclass(frozen=True, slots=True)
class RunOver:
    """The run has ended on this node."""

    run: str


@dataclass(frozen=True, slots=True)
class AnnounceAgain:
    """Announce the run's ranks again."""

    run: str


@dataclass(frozen=True, slots=True)
class TermSeen:
    """A command of this term has arrived. Ranks that are announced again have seen it."""

    run: str
    term: int


@dataclass(slots=True)
class SentRun:
    """The record of one run. `sealed` and `sealed_layout` hold the encoded envelopes as they were sent."""

    hellos: dict[int, Hello] = field(default_factory=dict)
    sealed: dict[int, bytes] = field(default_factory=dict)
    layout: Layout | None = None
    sealed_layout: bytes | None = None
    written_layout: bytes | None = None
    """The layout that is stored with the hellos in Redis."""
    ages: Ages = field(default_factory=lambda: Ages(time.monotonic))

    def learn_term(self, term: int) -> None:
        """See `TermSeen`."""
        for rank, hello in self.hellos.items():
            if hello.journal_term < term:
                self.hellos[rank] = msgspec.structs.replace(hello, journal_term=term)

    def announcement(self) -> list[Hello | Layout]:
        """The messages that announce the run again."""
        return [*self.hellos.values(), *([self.layout] if self.layout is not None and self.hellos else [])]

    def hash_fields(self, node: str) -> dict[str, bytes]:
        """Fields to write into the run's `ranks` hash in Redis: each rank's newest hello, and the node's layout if it
        is new. A new controller reads them when the stream has been trimmed."""
        found = {rank_field(rank, node): data for rank, data in self.sealed.items()}
        if self.sealed_layout is not None and self.sealed_layout is not self.written_layout and found:
            found[layout_field(node)] = self.sealed_layout
        return found


def rank_field(rank: int, node: str) -> str:
    """A rank's field in the `ranks` hash. It names the node, so that no node overwrites another's."""
    return f"{rank}@{node}"


def layout_field(node: str) -> str:
    """The field of a node's layout."""
    return f"layout@{node}"
