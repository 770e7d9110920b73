"""Functions of a library that are replaced for a while, and put back.

Somebody may patch on top of us meanwhile: then ours stays underneath, handing on, until they have left, and is taken
out at the next chance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
        _sets.add(self)

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

    def placed(self) -> Iterable[_Patch]:
        """What is replaced now."""
        return tuple(self._patches)


_sets: weakref.WeakSet[Patches] = weakref.WeakSet()


@contextmanager
def left_out() -> Iterator[None]:
    """In here the functions of the libraries are their own, whoever has replaced them for us in this process.

    For measuring a training that is not watched beside one that is. No watched training may make a step meanwhile.
    Where somebody else has patched on top of us, theirs stays, and ours under it.
    """
    found = [patch for patches in _sets for patch in patches.placed()]
    taken: list[tuple[Any, str, Callable[..., Any]]] = []
    for holder, name in {(id(patch.holder), patch.name): (patch.holder, patch.name) for patch in found}.values():
        below = [(patch.ours, patch.original) for patch in found if patch.holder is holder and patch.name == name]
        top = own = getattr(holder, name)
        while (under := next((original for ours, original in below if ours is own), None)) is not None:
            own = under
        if own is not top:
            setattr(holder, name, own)
            taken.append((holder, name, top))
    try:
        yield
    finally:
        for holder, name, top in taken:
            setattr(holder, name, top)
