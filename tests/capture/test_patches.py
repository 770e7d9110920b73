"""Functions of a library that we replace, and the context in which they are the originals again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fp8watch.capture import patches
from fp8watch.capture.patches import Patches
from fp8watch.capture.te.tap import UPDATE, UpdateTap


def library() -> Any:
    return SimpleNamespace(cast=lambda: ["library"], norm=lambda: ["library"])


def adding(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda original: lambda: [*original(), name]


def put(holder: Any, name: str) -> Patches:
    made = Patches()
    made.put([(holder, "cast", adding(name)), (holder, "norm", adding(name))])
    return made


def test_left_out_means_the_librarys_own_functions_and_then_ours_again() -> None:
    holder = library()
    own = holder.cast, holder.norm
    both = put(holder, "first"), put(holder, "second")
    ours = holder.cast, holder.norm
    assert holder.cast() == ["library", "first", "second"]
    with patches.left_out():
        assert (holder.cast, holder.norm) == own
    assert (holder.cast, holder.norm) == ours
    with pytest.raises(ValueError, match="of the block"), patches.left_out():
        raise ValueError("of the block")
    assert (holder.cast, holder.norm) == ours
    for made in reversed(both):
        made.take_out()
    assert (holder.cast, holder.norm) == own


def test_what_somebody_else_has_put_on_top_stays() -> None:
    holder = library()
    made = put(holder, "ours")
    theirs = holder.cast = adding("theirs")(holder.cast)
    with patches.left_out():
        assert holder.cast is theirs
        assert holder.norm() == ["library"]
    assert holder.cast() == ["library", "ours", "theirs"]
    assert holder.norm() == ["library", "ours"]
    above = put(holder, "again")
    with patches.left_out():
        assert holder.cast is theirs
    assert holder.cast() == ["library", "ours", "theirs", "again"]
    above.take_out()
    made.take_out()


def test_what_is_taken_out_or_gone_is_not_put_in_again() -> None:
    holder = library()
    own = holder.cast
    put(holder, "taken").take_out()
    with patches.left_out():
        assert holder.cast is own
    assert holder.cast is own


def test_a_tap_hears_nothing_in_it_and_all_after_it() -> None:
    heard: list[Any] = []
    holder = SimpleNamespace(**{UPDATE: lambda amax, histories, scales: "updated"})
    tap = UpdateTap(holder)
    tap.subscribe(lambda amax, scales: heard.append(amax))
    getattr(holder, UPDATE)(1, [], [])
    with patches.left_out():
        assert getattr(holder, UPDATE)(2, [], []) == "updated"
    assert getattr(holder, UPDATE)(3, [], []) == "updated"
    assert heard == [1, 3]
