"""Temporarily replaces functions of a library, and restores them.

Somebody else may patch on top of ours meanwhile. Then ours stays underneath and passes calls on, and is removed at the
next `take_out` after theirs has gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Original function -> its replacement."""


@dataclass(frozen=True, slots=True)
class _Patch:
    holder: Any
    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]


class Patches:
    """A set of attributes, replaced and restored together. Not thread-safe: the owner must hold a lock."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []
        _sets.add(self)

    def __bool__(self) -> bool:
        return bool(self._patches)

    def put(self, places: Iterable[tuple[Any, str, Make]]) -> None:
        """Replace `holder.name` for each place.

        Raises `AttributeError`, and replaces nothing, if one of them does not exist.
        """
        found = [(holder, name, getattr(holder, name), make) for holder, name, make in places]
        for holder, name, original, make in found:
            ours = make(original)
            setattr(holder, name, ours)
            self._patches.append(_Patch(holder, name, original, ours))

    def take_out(self) -> None:
        """Restore the originals wherever ours is still on top."""
        left = []
        for patch in self._patches:
            if getattr(patch.holder, patch.name) is patch.ours:
                setattr(patch.holder, patch.name, patch.original)
            else:
                left.append(patch)
        self._patches = left

    def placed(self) -> Iterable[_Patch]:
        """The replacements in place."""
        return tuple(self._patches)


_sets: weakref.WeakSet[Patches] = weakref.WeakSet()


@contextmanager
def left_out() -> Iterator[None]:
    """Within this context all our patches in this process are out, and the libraries' functions are the originals.

    For measuring unwatched training beside watched training. No watched training may take a step meanwhile.
    Where somebody else has patched on top of ours, both patches stay.
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
