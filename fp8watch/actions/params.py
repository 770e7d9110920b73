"""Reads and checks an action's parameters, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fp8watch.errors import ActionError

_MISSING = object()


def number(
    params: Mapping[str, Any],
    name: str,
    default: Any = _MISSING,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> float:
    """A finite number within bounds. Raises `ActionError`."""
    value = params.get(name, default)
    if value is _MISSING:
        raise ActionError(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ActionError(f"{name} is {value!r}, a number is needed")
    for is_broken, bound in (
        (above is not None and value <= above, f"above {above}"),
        (at_least is not None and value < at_least, f"at least {at_least}"),
        (at_most is not None and value > at_most, f"at most {at_most}"),
        (below is not None and value >= below, f"below {below}"),
    ):
        if is_broken:
            raise ActionError(f"{name} is {value!r}, it must be {bound}")
    return float(value)


def whole(
    params: Mapping[str, Any], name: str, default: Any = _MISSING, *, at_least: int = 0, at_most: int | None = None
) -> int:
    """A whole number. Raises `ActionError`."""
    value = number(params, name, default, at_least=at_least, at_most=at_most)
    if value != int(value):
        raise ActionError(f"{name} is {value!r}, a whole number is needed")
    return int(value)


def flag(params: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false. Raises `ActionError`."""
    value = params.get(name, default)
    if not isinstance(value, bool):
        raise ActionError(f"{name} is {value!r}, true or false is needed")
    return value


def names(params: Mapping[str, Any], name: str, known: Sequence[str], elsewhere: Collection[str] = ()) -> list[str]:
    """A list of known names, in the given order and without duplicates. Names in `elsewhere` are valid but left out,
    because their modules are on other ranks. Raises `ActionError`, also for an empty list."""
    value = params.get(name)
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) for item in value):
        raise ActionError(f"{name} is {value!r}, a list of names is needed")
    unknown = [item for item in value if item not in known and item not in elsewhere]
    if unknown:
        raise ActionError(f"{name}: unknown {', '.join(unknown)}")
    return [item for item in dict.fromkeys(value) if item in known]
