"""What a value in a record may be at most. The decoders of `fp8watch.wire` refuse a record that is out of bounds as
malformed, so that no number from outside can overflow what sorts, adds, stores or allocates by it.

The types bound a field, `check` what only several fields together tell. Neither applies to a record made in this
process, where nothing may raise for a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

if TYPE_CHECKING:
    from fp8watch.layout import Layout
    from fp8watch.records import Hello, NodeFrame

MAX_WORLD_SIZE = 1_048_576
"""Most ranks of a run."""
MAX_NAME_LENGTH = 256
"""Most characters of a run's or a node's name (`fp8watch.attach` shortens a run's to 64)."""
MAX_HISTORY = 65_536
"""Longest amax window of a tensor, in updates."""
MAX_WINDOW_ENTRIES = 2**26
"""Most entries of all amax windows of a layout: 12 bytes each where a detector keeps them."""
LARGEST = 2**53 - 1
"""Largest whole number that a double holds exactly, as JSON and Redis' scripts need it."""
LARGEST_SENT = 2**48
"""Largest step or term that a rank may send: what is counted from it (a command's last step) stays below `LARGEST`."""

Step = Annotated[int, Meta(ge=0, le=LARGEST_SENT)]
"""A step that a rank reports."""
Term = Annotated[int, Meta(ge=0, le=LARGEST_SENT)]
"""A term that a rank reports."""
Attempt = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE)]
Ranks = Annotated[list[Rank], Meta(max_length=MAX_WORLD_SIZE)]
WorldSize = Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
"""Anything counted."""
Whole = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
"""A number that a controller has derived from others."""
Sequence = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A number that only orders and never takes part in a sum: what SQLite and msgpack hold."""
Updates = Annotated[int, Meta(ge=0, le=2**20)]
"""Scale updates in a step."""
History = Annotated[int, Meta(ge=0, le=MAX_HISTORY)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
"""Name of a run or a node."""
Owner = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""User id."""
Start = Annotated[str, Meta(max_length=64)]
"""Name of a start of a run's training processes (32 hexadecimal digits), or empty."""
Unix = Annotated[float, Meta(ge=0.0, le=253_402_300_799.0)]
"""Seconds since 1970, up to the year 9999; neither NaN nor infinite."""


def check(record: Any) -> None:
    """Raise `ValueError` if the fields of a decoded record contradict each other."""
    tag = type(record).__struct_config__.tag
    if tag == "hello":
        _hello(record)
    elif tag == "run":
        _hello(record.hello)
    elif tag == "layout":
        _layout(record)
    elif tag == "node":
        _node(record)


def _hello(hello: Hello) -> None:
    if hello.rank >= hello.world_size:
        raise ValueError(f"rank {hello.rank} of a run of {hello.world_size} ranks")


def _layout(layout: Layout) -> None:
    longest = max((column.history_len for column in layout.columns), default=0)
    if longest * len(layout.columns) > MAX_WINDOW_ENTRIES:
        raise ValueError(f"amax windows of {len(layout.columns)} tensors with up to {longest} updates")


def _node(frame: NodeFrame) -> None:
    if not frame.ranks or len(frame.ranks) != len(frame.scalars):
        raise ValueError(f"{len(frame.ranks)} ranks with {len(frame.scalars)} sets of scalars")
    if any(low >= high for low, high in zip(frame.ranks, frame.ranks[1:], strict=False)):
        raise ValueError("ranks are not in ascending order")
