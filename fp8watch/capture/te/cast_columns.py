"""A sampled step's counters as columns: sums over programs, in the order of the reading they are added to.

On a GPU every operation costs the host more than the device. So what stays the same from one sampled step to the next
is kept on the device: which row is which column, and, with batches of one size, how many elements were cast. The parts
of a reading that is not put together yet stay parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fp8watch.capture.source import Pieces, Places, Reading
from fp8watch.capture.te.cast_rows import CastRows
from fp8watch.capture.to_device import to_device
from fp8watch.capture.what_if import WhatIfLog
from fp8watch.records import TensorColumn

NO_ROW = -1
"""Of a column that has none: picks the element behind those of the rows, which is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Which row is which column, as it was in the last sampled step."""

    columns: Sequence[TensorColumn]
    places: Places | None
    num_rows: int
    by_column: npt.NDArray[np.int64]
    """[columns]: the row of each column, or NO_ROW."""
    by_part: npt.NDArray[np.int64]
    """The same in the order of the reading's joined parts, [elements of the parts]."""
    rows: torch.Tensor
    index: torch.Tensor
    """Both on the device, int64, with 0 in place of NO_ROW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Amounts:
    """How many elements were cast in the last sampled step."""

    order: _Order
    elements: list[int]
    """By row."""
    seen: npt.NDArray[np.bool_]
    was_seen: torch.Tensor
    """By column, the second one on the device: whether it was cast at all."""
    quantized: torch.Tensor
    """Elements of each column, int64, in the order of the joined parts."""
    divisor: torch.Tensor
    """The same, at least 1."""


class CastColumns:
    """Adds the counters of one `CastRows` to readings, sampled step after sampled step."""

    def __init__(self) -> None:
        self._order: _Order | None = None
        self._amounts: _Amounts | None = None

    def add_to(
        self, reading: Reading, columns: Sequence[TensorColumn], rows: CastRows, what_if: WhatIfLog | None
    ) -> Reading:
        """The reading with the columns `quantized`, `saturated`, `underflowed` and `nonfinite` (int64), `mse` and `snr`
        (float32), and the figures of `what_if`, on the device that counted."""
        pieces = reading.values if isinstance(reading.values, Pieces) else None
        if pieces is not None and pieces.places is not None and len(pieces.places.host) != len(columns):
            pieces = None  # of a step before the columns changed
        order = self._order_of(columns, pieces, rows)
        amounts = self._amounts_of(order, rows)
        index = order.index
        all_counts, all_sums = rows.totals()
        saturated, before, after, nonfinite = all_counts.t().index_select(1, index).unbind(0)
        error, square = all_sums.t().index_select(1, index).unbind(0)
        values = {
            "quantized": amounts.quantized, "saturated": saturated, "underflowed": before - after,
            "nonfinite": nonfinite, "mse": error / amounts.divisor, "snr": (square / error).log10_().mul_(10.0),
        }  # fmt: skip
        valid = dict.fromkeys(values, amounts.was_seen)
        if what_if is not None and (closer := what_if.columns()) is not None:
            figures, has = closer
            last = len(has) - 1
            values |= {name: held[index.clamp(max=last)] for name, held in figures.items()}
            looked_at = has[order.rows.clamp(max=last)] & (order.rows <= last) & amounts.was_seen
            valid |= dict.fromkeys(figures, looked_at)
        joined: Pieces | dict[str, torch.Tensor]
        if pieces is not None:
            joined = Pieces(pieces.parts | {name: [held] for name, held in values.items()}, pieces.places)
        else:
            joined = {**reading.values, **values}
        return Reading(
            values=joined, valid=reading.valid | valid, zero_is_unseen=reading.zero_is_unseen,
            updates_forward=reading.updates_forward, updates_backward=reading.updates_backward,
        )  # fmt: skip

    def _order_of(self, columns: Sequence[TensorColumn], pieces: Pieces | None, rows: CastRows) -> _Order:
        places = None if pieces is None else pieces.places
        known = self._order
        if known is None or known.columns is not columns or known.places is not places or known.num_rows != len(rows):
            known = self._order = _new_order(columns, pieces, rows)
        return known

    def _amounts_of(self, order: _Order, rows: CastRows) -> _Amounts:
        elements = [row.elements for row in rows]
        known = self._amounts
        if known is None or known.order is not order or known.elements != elements:
            known = self._amounts = _new_amounts(order, elements, rows.device, known)
        return known


def _new_order(columns: Sequence[TensorColumn], pieces: Pieces | None, rows: CastRows) -> _Order:
    found = [rows.get((column.module, column.tensor)) for column in columns]
    by_part = by_column = np.array([NO_ROW if row is None else row.number for row in found], np.int64)
    on_device = index = to_device(torch.from_numpy(by_column.clip(0)), rows.device)
    places = None if pieces is None else pieces.places
    if pieces is not None and places is not None:
        by_part = np.full(sum(part.numel() for part in next(iter(pieces.parts.values()))), NO_ROW, np.int64)
        by_part[places.host] = by_column
        index = to_device(torch.from_numpy(by_part.clip(0)), rows.device)
    return _Order(
        columns=columns, places=places, num_rows=len(rows), by_column=by_column, by_part=by_part, rows=on_device,
        index=index,
    )  # fmt: skip


def _new_amounts(order: _Order, elements: list[int], device: torch.device, known: _Amounts | None) -> _Amounts:
    """`known`: those of an earlier step, whose `was_seen` may still be right."""
    by_row = np.array([*elements, 0], np.int64)
    seen = by_row[order.by_column] > 0
    if known is not None and known.order is order and np.array_equal(known.seen, seen):
        was_seen = known.was_seen
    else:
        was_seen = to_device(torch.from_numpy(seen), device)
    quantized = by_row[order.by_part]
    amounts = to_device(torch.from_numpy(np.stack([quantized, quantized.clip(1)])), device)
    return _Amounts(
        order=order, elements=elements, seen=seen, was_seen=was_seen, quantized=amounts[0], divisor=amounts[1]
    )  # fmt: skip
