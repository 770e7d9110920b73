"""A sampled step's counters as columns: sums over programs, in the order of the reading they are added to.

On a GPU every operation costs the host more than the device. So what stays the same from one sampled step to the next
(which row is which column, how many elements were cast) is kept on the device, and the parts of a reading that is not
put together yet stay parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8watch.capture.source import Pieces, Places, Reading
from fp8watch.capture.te.cast_rows import CastRows
from fp8watch.capture.what_if import WhatIfLog
from fp8watch.records import TensorColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What was so in the last sampled step, and the tensors made from it."""

    columns: Sequence[TensorColumn]
    places: Places | None
    elements: list[int]
    """Elements counted, by row."""
    rows: torch.Tensor
    """int64 [columns]: the row of each column, 0 without one."""
    was_seen: torch.Tensor
    """bool [columns]"""
    index: torch.Tensor
    """`rows` in the order of the reading's joined parts, int64 [elements of the parts]."""
    quantized: torch.Tensor
    """Elements counted, in the same order, int64."""
    divisor: torch.Tensor
    """The same, at least 1."""


class CastColumns:
    """Adds the counters of one `CastRows` to readings, sampled step after sampled step."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def add_to(
        self, reading: Reading, columns: Sequence[TensorColumn], rows: CastRows, what_if: WhatIfLog | None
    ) -> Reading:
        """The reading with the columns `quantized`, `saturated`, `underflowed` and `nonfinite` (int64), `mse` and `snr`
        (float32), and the figures of `what_if`, on the device that counted."""
        pieces = reading.values if isinstance(reading.values, Pieces) else None
        if pieces is not None and pieces.places is not None and len(pieces.places.host) != len(columns):
            pieces = None  # of a step before the columns changed
        known = self._known_of(columns, pieces, rows)
        index = known.index
        counts = rows.counts.sum(1, dtype=torch.int64).t().index_select(1, index)
        saturated, before, after, nonfinite = counts.unbind(0)
        error, square = rows.sums.sum(1).t().index_select(1, index).unbind(0)
        values = {
            "quantized": known.quantized, "saturated": saturated, "underflowed": before - after, "nonfinite": nonfinite,
            "mse": error / known.divisor, "snr": (square / error).log10_().mul_(10.0),
        }  # fmt: skip
        valid = dict.fromkeys(values, known.was_seen)
        if what_if is not None and (closer := what_if.columns()) is not None:
            figures, has = closer
            last = len(has) - 1
            values |= {name: held[index.clamp(max=last)] for name, held in figures.items()}
            looked_at = has[known.rows.clamp(max=last)] & (known.rows <= last) & known.was_seen
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

    def _known_of(self, columns: Sequence[TensorColumn], pieces: Pieces | None, rows: CastRows) -> _Known:
        places = None if pieces is None else pieces.places
        elements = [row.elements for row in rows]
        known = self._known
        if (
            known is None or known.columns is not columns or known.places is not places or known.elements != elements
            or known.index.device != rows.device
        ):  # fmt: skip
            known = self._known = _know(columns, pieces, rows, elements)
        return known


def _know(columns: Sequence[TensorColumn], pieces: Pieces | None, rows: CastRows, elements: list[int]) -> _Known:
    found = [rows.get((column.module, column.tensor)) for column in columns]
    numbers = [0 if row is None else row.number for row in found]
    amounts = [0 if row is None else row.elements for row in found]
    by_column = index, quantized = _on_device([numbers, amounts], rows.device)
    places = None if pieces is None else pieces.places
    if pieces is not None and places is not None:
        size = sum(part.numel() for part in next(iter(pieces.parts.values())))
        spread = [[0] * size, [0] * size]
        for place, number, amount in zip(places.host.tolist(), numbers, amounts, strict=True):
            spread[0][place], spread[1][place] = number, amount
        index, quantized = _on_device(spread, rows.device)
    return _Known(
        columns=columns, places=places, elements=elements, rows=by_column[0], was_seen=by_column[1] > 0,
        index=index, quantized=quantized, divisor=quantized.clamp(min=1),
    )  # fmt: skip


def _on_device(lists: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int64 vectors, copied without waiting."""
    table = torch.tensor(lists, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    first, second = table.unbind(0)
    return first, second
