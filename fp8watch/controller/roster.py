"""What the ranks of a run say together: each has introduced itself with a `Hello`, and the run is all of them."""

from __future__ import annotations

from collections.abc import Mapping

from fp8watch.records import Hello

Ranks = Mapping[int, Hello]
"""Rank -> what it said of itself last, of the ranks that are connected."""


def warmup_steps(ranks: Ranks) -> int | None:
    """The longest warm-up that a rank's scheduler has; None where none is known."""
    return max((hello.warmup_steps for hello in ranks.values() if hello.warmup_steps is not None), default=None)


def is_warm_up(ranks: Ranks, step: int) -> bool:
    """Whether the step is of a warm-up whose length is known."""
    known = warmup_steps(ranks)
    return known is not None and step <= known


def unavailable(ranks: Ranks) -> dict[str, str]:
    """Actions that a rank cannot carry out, and why: what one cannot do, the run cannot."""
    return {name: why for hello in ranks.values() for name, why in hello.capabilities.items() if why}


def why_disarmed(ranks: Ranks) -> str:
    """Why nothing may act, as far as the ranks go; empty: it may."""
    if not all(hello.armed for hello in ranks.values()):
        return "disarmed in the training run"
    # A command reaches the ranks that are connected, and is carried out by all ranks or none.
    world = max((hello.world_size for hello in ranks.values()), default=1)
    return "" if len(ranks) >= world else f"{len(ranks)} of {world} ranks are connected"
