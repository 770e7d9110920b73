"""The collective used by the rounds: an all-reduce (element-wise minimum) of a few int64 numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TransportLost(Exception):
    """A rank is gone, or did not take part in time."""


class Pending(Protocol):
    """A reduction that was started."""

    def wait(self, seconds: float) -> list[int]:
        """Wait for the minimum over all ranks. Raises `TransportLost`."""


class Transport(Protocol):
    """A group of ranks. Reductions match by order: every rank starts the same ones in the same order."""

    def start(self, values: Sequence[int]) -> Pending:
        """Start a reduction without waiting. Errors are raised by `Pending.wait`, not here."""

    def close(self) -> None:
        """Leave the group. Other ranks that wait for this one get `TransportLost`."""
