"""What several applications of one action have set side by side: each is taken away by itself, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class InForce(Generic[T]):
    """Values in the order in which they were set, by a number of their own. Empty, it is false."""

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
        """Its number."""
        number = next(self._numbers)
        self._values[number] = value
        return number

    def remove(self, number: int) -> bool:
        """Whether it was in force until now."""
        return self._values.pop(number, None) is not None

    def latest(self, own: T) -> T:
        """The value set last; `own` where none is left."""
        return next(reversed(self._values.values()), own)
