"""Whether all ranks carry out the same commands at the same boundary: the seam for runs of several processes.

With one process there is nobody to agree with. Runs of several processes are observed only in this version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fp8watch.records import Command

SEVERAL_RANKS = "several ranks: not yet"


class Agreement(Protocol):
    """Decides at each boundary which verified commands all ranks carry out now."""

    unavailable: str | None
    """Why nothing can be agreed upon in this run; None: it can."""

    def due(self, ready: Sequence[Command], step: int) -> list[Command]:
        """Of the commands this rank is ready for, in order, those that every rank carries out at this boundary."""

    def close(self) -> None:
        """Drain what is under way; no further boundary follows."""


class SingleProcess:
    """One process agrees with itself, at once."""

    unavailable: str | None = None

    def due(self, ready: Sequence[Command], step: int) -> list[Command]:
        """All of them."""
        return list(ready)

    def close(self) -> None:
        """Nothing is under way."""


class ObserveOnly:
    """Nothing is ever carried out."""

    unavailable: str | None = SEVERAL_RANKS

    def due(self, ready: Sequence[Command], step: int) -> list[Command]:
        """None of them."""
        return []

    def close(self) -> None:
        """Nothing is under way."""
