"""Values set by several applications of one action. Each can be removed on its own, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class InForce(Generic[T]):
    """Values in the order in which they were added, each with its own number. False if empty."""

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, number: int) -> bool:
        return number in self._values

    @property
    def values(self) -> Collection[T]:
        """Oldest first."""
        return self._values.values()

    def add(self, value: T) -> int:
        """Add a value; returns its number."""
        number = next(self._numbers)
        self._values[number] = value
        return number

    def restorer(self) -> Callable[[], None]:
        """A function that puts back the values of now."""
        held = dict(self._values)
        return lambda: setattr(self, "_values", dict(held))

    def remove(self, number: int) -> bool:
        """Remove a value by its number. False: it was not there."""
        return self._values.pop(number, None) is not None

    def latest(self, own: T) -> T:
        """The value added last; `own` if there is none."""
        return next(reversed(self._values.values()), own)
