"""Whether all ranks carry out the same commands at the same boundary.

`base` is what the step boundary talks to, and the answer for one process. For several, `rounds` is the protocol as a
state machine without threads, sockets or torch, `all_ranks` runs it over a `transport`, and `join` brings the ranks
together at attach. docs/actions.md, "Several ranks", tells what it promises.
"""

from fp8watch.training.agreement.all_ranks import AllRanks
from fp8watch.training.agreement.base import (
    Agreement,
    Candidate,
    Fate,
    Joint,
    ObserveOnly,
    Ruling,
    SingleProcess,
)

__all__ = ["Agreement", "AllRanks", "Candidate", "Fate", "Joint", "ObserveOnly", "Ruling", "SingleProcess"]
