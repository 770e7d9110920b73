"""Functions of a library that are replaced for a while, and put back.

Somebody may patch on top of us meanwhile: then ours stays underneath, handing on, until they have left, and is taken
out at the next chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Original function -> the one to stand in its place."""


@dataclass(frozen=True, slots=True)
class _Patch:
    holder: Any
    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]


class Patches:
    """A set of replaced attributes, put in and taken out together. Not thread-safe: the owner holds a lock."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def __bool__(self) -> bool:
        return bool(self._patches)

    def put(self, places: Iterable[tuple[Any, str, Make]]) -> None:
        """Replace `holder.name` for each place; nothing is replaced if one of them does not exist.

        Raises `AttributeError`.
        """
        found = [(holder, name, getattr(holder, name), make) for holder, name, make in places]
        for holder, name, original, make in found:
            ours = make(original)
            setattr(holder, name, ours)
            self._patches.append(_Patch(holder, name, original, ours))

    def take_out(self) -> None:
        """Put the originals back where ours is still on top."""
        left = []
        for patch in self._patches:
            if getattr(patch.holder, patch.name) is patch.ours:
                setattr(patch.holder, patch.name, patch.original)
            else:
                left.append(patch)
        self._patches = left
