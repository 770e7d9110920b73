"""Which of the frames in a run's stream were its own: what a node sent that did not hold the rank was refused, and lies
there all the same until it is trimmed.

Where a rank was is in the hellos that the controller accepted (`Arrival`): a reader sees the frames that it saw.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8watch import wire
from fp8watch.controller.inbox import entry_number
from fp8watch.errors import WireError
from fp8watch.records import Arrival, Hello, NodeFrame


class FrameHolders:
    """For frames in the order of the stream. `arrivals`: those of the run; of an earlier version, they name no nodes,
    and every frame counts."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._moves = sorted(move for arrival in arrivals for move in _moves(arrival))
        self._next = 0
        self._nodes: dict[int, str] = {}

    def is_held(self, entry_id: str, frame: NodeFrame) -> bool:
        """Whether the node that sent this entry held all ranks that are in it."""
        number = entry_number(entry_id)
        while self._next < len(self._moves) and self._moves[self._next][0] <= number:
            _, _, rank, node = self._moves[self._next]
            self._nodes[rank] = node
            self._next += 1
        return all(self._nodes.get(rank, frame.node) == frame.node for rank in frame.ranks)


def _moves(arrival: Arrival) -> list[tuple[tuple[int, int], int, int, str]]:
    """(entry, place among the arrivals, rank, node) of an accepted hello."""
    if arrival.kind != "hello" or not arrival.key:
        return []
    try:
        hello = wire.unpack_message(arrival.body)
    except WireError:
        return []
    if not isinstance(hello, Hello):
        return []
    return [(entry_number(arrival.after), arrival.sequence, hello.rank, arrival.key)]
