"""Whether a hello comes from the training processes that are already known, or from restarted ones."""

from __future__ import annotations

from collections.abc import Mapping

from fp8watch.records import Hello


def is_started_anew(ranks: Mapping[int, Hello], known: Hello, hello: Hello) -> bool:
    """Whether training was restarted since. `ranks`: those connected; `known`: the hello in the run's record.

    The end of the earlier process may not have been noticed yet, and a restart is not a rollback: checkpoints of the
    earlier attempt are as good as they were.
    """
    if any(_is_other_start(other, hello) for other in ranks.values()):
        return True
    before = ranks.get(hello.rank)
    if before is not None:
        return (before.pid, before.host) != (hello.pid, hello.host)
    return not ranks and not is_same_process(known, hello)


def is_same_process(known: Hello, hello: Hello) -> bool:
    """Whether a hello comes from the known training processes, not from restarted ones.

    When the known hello is of another rank, only the attempt can be compared, where the ranks have no common name for
    their start: every start begins a new one.
    """
    if _is_other_start(known, hello):
        return False
    if known.rank == hello.rank:
        # A process that attaches again has another attempt, and nothing in force.
        return (known.pid, known.host, known.attempt) == (hello.pid, hello.host, hello.attempt)
    return known.attempt == hello.attempt


def _is_other_start(known: Hello, hello: Hello) -> bool:
    """Whether both name their start, and differ. A process number may be the same in two containers of one name."""
    return bool(known.start and hello.start) and known.start != hello.start
