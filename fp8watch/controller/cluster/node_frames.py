"""Reduces the frames of a node's local ranks to one `NodeFrame`, and expands it again for a reader of single ranks.

Tensors are matched by module name, never by position. If all ranks hold the same tensors (data parallel) the reduction
is one numpy call per column; else each rank's columns are first spread over the union of all names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch import columns
from fp8watch.controller import merge
from fp8watch.controller.merge import precision_checksum, scale_checksum
from fp8watch.errors import WireError
from fp8watch.records import Column, NodeFrame, StepFrame, TensorColumn

OWN = frozenset({"amax_rank", "amax_low"})
"""Columns that only a `NodeFrame` has."""

SCALE_CHECKSUM = "scale_checksum"
"""A scalar that a `NodeFrame` has for each rank (`fp8watch.controller.merge.scale_checksum`)."""
PRECISION_CHECKSUM = "precision_checksum"
"""Likewise (`fp8watch.controller.merge.precision_checksum`)."""
OF_RANKS = frozenset({SCALE_CHECKSUM, PRECISION_CHECKSUM})

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


class NodeLayout:
    """The node's order of tensors: the union of its ranks' layouts. Names are only ever added."""

    def __init__(self) -> None:
        self.columns: dict[str, TensorColumn] = {}
        self._spots: dict[tuple[int, int], tuple[npt.NDArray[np.intp], bool]] = {}

    def add(self, rank: int, layout_id: int, announced: list[TensorColumn]) -> bool:
        """Add a rank's layout. Returns whether it has changed the node's."""
        before = dict(self.columns)
        for column in announced:
            self.columns[column.name] = column
        index = {name: position for position, name in enumerate(self.columns)}
        spots = np.array([index[column.name] for column in announced], dtype=np.intp)
        self._spots[rank, layout_id] = spots, bool((spots == np.arange(len(spots))).all())
        return before != self.columns

    def spots(self, rank: int, layout_id: int) -> tuple[npt.NDArray[np.intp], bool] | None:
        """(position of each of the rank's columns, whether these are 0, 1, 2, ...); None: its layout is unknown."""
        return self._spots.get((rank, layout_id))


def reduce(frames: list[StepFrame], layout: NodeLayout, *, node: str, layout_id: int, lead: int) -> NodeFrame:
    """One node's frame of one step from the frames of its ranks, sorted by rank. Raises `WireError` for a column of
    the wrong length."""
    first = frames[0]
    dropped: dict[str, int] = {}
    for frame in frames:
        for reason, count in frame.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return NodeFrame(
        run=first.run,
        attempt=first.attempt,
        node=node,
        rank=lead,
        step=first.step,
        layout_id=layout_id,
        time_unix=max(frame.time_unix for frame in frames),
        ranks=[frame.rank for frame in frames],
        scalars=[_scalars(frame) for frame in frames],
        columns=_columns(frames, layout),
        updates_forward=max(frame.updates_forward for frame in frames),
        updates_backward=max(frame.updates_backward for frame in frames),
        dropped=dropped,
    )


def _scalars(frame: StepFrame) -> dict[str, float]:
    """A rank's scalars, with checksums of columns that replicas must have in common and that the reduction loses."""
    found = {SCALE_CHECKSUM: scale_checksum(frame), PRECISION_CHECKSUM: precision_checksum(frame)}
    return frame.scalars | {name: checksum for name, checksum in found.items() if checksum is not None}


def _columns(frames: list[StepFrame], layout: NodeLayout) -> dict[str, Column]:
    size = len(layout.columns)
    packed: dict[str, Column] = {}
    names = dict.fromkeys(name for frame in frames for name in frame.columns)
    held = {name: _stack(frames, layout, name, size) for name in names}
    for name, (rows, masks, _) in held.items():
        if name != "scale":
            packed[name] = columns.pack(reduced(name, rows, masks), _kind(rows), np.logical_or.reduce(masks))
    if "amax" in held:
        rows, masks, _ = held["amax"]
        seen = np.logical_or.reduce(masks)
        low = np.where(seen, np.where(masks, rows, np.inf).min(axis=0), 0)
        packed["amax_low"] = columns.pack(low.astype(np.float32), "f4", seen)
        # After a reduction across ranks, amax is the same on all of them.
        rows, masks, ranks = held.get("amax_local", held["amax"])
        worst = np.where(masks, np.where(np.isnan(rows), np.inf, rows), -np.inf).argmax(axis=0)
        packed["amax_rank"] = columns.pack(np.asarray(ranks, dtype=np.uint8)[worst], "u1", np.logical_or.reduce(masks))
    if "scale" in held:
        rows, masks, ranks = held["scale"]
        amax = np.ones_like(rows)
        if "amax" in held:
            of_rank = {rank: row for rank, row in zip(held["amax"][2], held["amax"][0], strict=True)}
            amax = np.stack([of_rank.get(rank, np.ones(size, np.float32)) for rank in ranks])
        packed["scale"] = columns.pack(nearest_to_clipping(rows, amax, masks), "f4", np.logical_or.reduce(masks))
    return packed


def _stack(frames: list[StepFrame], layout: NodeLayout, name: str, size: int) -> tuple[Array, Mask, list[int]]:
    """(values, observed, index into `frames`) of one column, with a row for each rank that has it."""
    rows, masks, ranks = [], [], []
    for position, frame in enumerate(frames):
        column, known_spots = frame.columns.get(name), layout.spots(frame.rank, frame.layout_id)
        if column is None or known_spots is None:
            continue
        spots, is_straight = known_spots
        values, valid = columns.unpack(column)
        if len(values) != len(spots):
            raise WireError(f"column {name} has {len(values)} values, its layout {len(spots)}")
        if len(spots) != size or not is_straight:
            values, valid = columns.spread(values, valid, spots, size)
        rows.append(values)
        masks.append(valid)
        ranks.append(position)
    if not rows:
        return np.zeros((1, size), dtype=np.float32), np.zeros((1, size), dtype=np.bool_), [0]
    return np.stack(rows), np.stack(masks), ranks


def reduced(name: str, rows: Array, masks: Mask) -> Array:
    """[num_tensors] one column over the rows that observed it (`masks`), by the rules of `fp8watch.controller.merge`:
    counts are summed, of a signal to noise ratio the smallest is kept, of all else the largest (NaN counts as such). 0
    where no row observed it."""
    if name in merge._COUNTS:
        return np.asarray(np.where(masks, rows, 0).sum(axis=0, dtype=rows.dtype))
    seen = np.logical_or.reduce(masks)
    if name.endswith("snr"):
        return np.where(seen, np.fmin.reduce(np.where(masks, rows, np.nan), axis=0), 0).astype(rows.dtype)
    lowest = np.asarray(-np.inf if rows.dtype.kind == "f" else 0, dtype=rows.dtype)
    largest = rows.max(axis=0) if masks.all() else np.where(masks, rows, lowest).max(axis=0)
    return np.where(seen, largest, np.zeros((), rows.dtype))


def nearest_to_clipping(scales: Array, amax: Array, masks: Mask) -> Array:
    """[num_tensors] the scale of the row with the largest amax * scale; a product that is not finite is the largest."""
    with np.errstate(all="ignore"):
        product = amax * scales
    nearest = np.where(masks, np.where(np.isfinite(product), product, np.inf), -np.inf).argmax(axis=0)
    return np.asarray(scales[nearest, np.arange(scales.shape[1])])


def _kind(values: Array) -> str:
    return {"f": "f4", "u": "u8" if values.dtype.itemsize == 8 else "u1"}[values.dtype.kind]


def expand(frame: NodeFrame) -> list[StepFrame]:
    """Frames for a reader of single ranks: each has its scalars; the lowest rank has the columns of the whole node."""
    shared = {name: column for name, column in frame.columns.items() if name not in OWN}
    return [
        StepFrame(
            run=frame.run,
            attempt=frame.attempt,
            rank=rank,
            step=frame.step,
            layout_id=frame.layout_id,
            time_unix=frame.time_unix,
            scalars={name: value for name, value in scalars.items() if name not in OF_RANKS},
            columns=shared if position == 0 else {},
            updates_forward=frame.updates_forward,
            updates_backward=frame.updates_backward,
        )
        for position, (rank, scalars) in enumerate(zip(frame.ranks, frame.scalars, strict=False))
    ]
