"""Hooks that stay with the model they were put on: a copy or a pickle of it has one that does nothing.

A model is copied for averaging, saved whole, or sent to another process while it is watched. A local function as a
hook cannot be pickled at all, and a copied one would go on reporting, for the copy, under the original's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StaysHere:
    """A hook that calls `function`, and whose copies and pickles call nothing."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Whatever torch gives a hook, and what the function gives back."""
        return None if self._function is None else self._function(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaysHere:
        return StaysHere()

    def __reduce__(self) -> tuple[type[StaysHere], tuple[()]]:
        return StaysHere, ()
