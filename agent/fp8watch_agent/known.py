"""What of each run is on this node, as the uplink's thread knows it: what it has sent and may have to say again.

It changes on that thread only, in the order of the messages. What others want changed (`Over`, `Again`, `Heard`) waits
in the same queue: a run may end before its hello was sent, and a hello repeated after a goodbye would never end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from fp8watch.records import Hello, Layout
from fp8watch_agent.trim import Ages


@dataclass(frozen=True, slots=True)
class Over:
    """The run is over on this node."""

    run: str


@dataclass(frozen=True, slots=True)
class Again:
    """Say again which ranks of the run are here."""

    run: str


@dataclass(frozen=True, slots=True)
class Heard:
    """A command of this term was heard: ranks that are announced again have seen it."""

    run: str
    term: int


@dataclass(slots=True)
class Known:
    """Of one run. Sealed: as they were sent."""

    hellos: dict[int, Hello] = field(default_factory=dict)
    sealed: dict[int, bytes] = field(default_factory=dict)
    layout: Layout | None = None
    sealed_layout: bytes | None = None
    written_layout: bytes | None = None
    """The one that is beside the hellos in Redis."""
    ages: Ages = field(default_factory=lambda: Ages(time.monotonic))

    def learn_term(self, term: int) -> None:
        """See `Heard`."""
        for rank, hello in self.hellos.items():
            if hello.journal_term < term:
                self.hellos[rank] = msgspec.structs.replace(hello, journal_term=term)

    def announcement(self) -> list[Hello | Layout]:
        """All that is to be said again."""
        return [*self.hellos.values(), *([self.layout] if self.layout is not None and self.hellos else [])]

    def beside(self, node: str) -> dict[str, bytes]:
        """What belongs into the run's `ranks` in Redis: the newest hello of each rank, and the node's layout if it is
        not there yet. A successor finds them there when the stream has been trimmed."""
        found = {rank_field(rank, node): data for rank, data in self.sealed.items()}
        if self.sealed_layout is not None and self.sealed_layout is not self.written_layout and found:
            found[layout_field(node)] = self.sealed_layout
        return found


def rank_field(rank: int, node: str) -> str:
    """A rank's field in the run's `ranks`: a node never writes over what another has said."""
    return f"{rank}@{node}"


def layout_field(node: str) -> str:
    """The field of a node's layout."""
    return f"layout@{node}"
