"""Agreement between ranks: all of them carry out a command at the same step boundary, or none does.

`base` is the interface used by the step boundary, with the implementation for one process. For several ranks, `rounds`
is the protocol as a state machine without threads, sockets or torch; `all_ranks` runs it over a `transport`; `join`
brings the ranks together at attach. The guarantees are in docs/actions.md, "Several ranks".
"""

from fp8watch.training.agreement.all_ranks import AllRanks
from fp8watch.training.agreement.base import (
    Agreement,
    Candidate,
    JointOutcome,
    ObserveOnly,
    RankOutcome,
    Ruling,
    SingleProcess,
)

__all__ = [
    "Agreement",
    "AllRanks",
    "Candidate",
    "JointOutcome",
    "ObserveOnly",
    "RankOutcome",
    "Ruling",
    "SingleProcess",
]
