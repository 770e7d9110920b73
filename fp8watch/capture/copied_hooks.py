"""Hooks that work only on the model they were registered on: in a copy or a pickle of it they do nothing.

A watched model may be copied for averaging, saved whole, or sent to another process. A local function as a hook cannot
be pickled at all, and a copied hook would report the copy's values under the original's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StaysHere:
    """A hook that calls `function`; its copies and pickles call nothing."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Pass torch's arguments to the function and return its result."""
        return None if self._function is None else self._function(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaysHere:
        return StaysHere()

    def __reduce__(self) -> tuple[type[StaysHere], tuple[()]]:
        return StaysHere, ()
