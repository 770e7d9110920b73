"""The wire below the rounds: the element-wise minimum over all ranks of a few 64-bit numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TransportLost(Exception):
    """A rank is gone, or did not come in time."""


class Pending(Protocol):
    """A reduction under way."""

    def wait(self, seconds: float) -> list[int]:
        """The minimum over all ranks. Raises `TransportLost`."""


class Transport(Protocol):
    """Reductions are matched by the order in which each rank starts them."""

    def start(self, values: Sequence[int]) -> Pending:
        """Start one; what goes wrong is raised when it is waited for."""

    def close(self) -> None:
        """Let go; other ranks that wait for this one lose what they wait for."""
