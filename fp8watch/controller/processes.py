"""Whether a hello comes from the training processes that are known already, or from ones that were started anew."""

from __future__ import annotations

from collections.abc import Mapping

from fp8watch.records import Hello


def is_started_anew(ranks: Mapping[int, Hello], known: Hello, hello: Hello) -> bool:
    """Whether training was started again since. `ranks`: those connected; `known`: the hello that the record shows.

    The end of the process before may not have been noticed yet, and a start is no rollback: checkpoints of the attempt
    before are as good as they were.
    """
    before = ranks.get(hello.rank)
    if before is not None:
        return (before.pid, before.host) != (hello.pid, hello.host)
    return not ranks and not is_same_process(known, hello)


def is_same_process(known: Hello, hello: Hello) -> bool:
    """Whether a hello comes from the training processes that are known already, and not from ones started anew.

    Of another rank than the one that is known only the attempt can be compared: every start begins a new one.
    """
    if known.rank == hello.rank:
        # Attached anew in the same process it has another attempt, and nothing in force.
        return (known.pid, known.host, known.attempt) == (hello.pid, hello.host, hello.attempt)
    return known.attempt == hello.attempt
