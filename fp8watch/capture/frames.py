"""From what the ring brings to the host to the records on the wire: layouts and step frames of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fp8watch import columns, what_if
from fp8watch.capture.source import Reading
from fp8watch.capture.update_size import UpdateSums, update_scalars
from fp8watch.records import Column, Layout, StepFrame, TensorColumn

COLUMN_DTYPES = {
    "amax": "f4", "amax_last": "f4", "amax_local": "f4", "scale": "f4", "mse": "f4", "snr": "f4",
    "high_precision": "u1", "quantized": "u8", "saturated": "u8", "underflowed": "u8", "nonfinite": "u8",
    "shadow_error": "f4",
    **what_if.COLUMNS,
}  # fmt: skip
"""Type of each per-tensor column on the wire; see `fp8watch.records.StepFrame`."""

_SCALAR, _COLUMN, _VALID = "s:", "c:", "v:"
_UPDATE = [f"update {i}" for i in range(5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """What is known on the host when a step's copy starts, and travels beside it."""

    step: int
    attempt: int
    layout: Layout
    time_unix: float
    scalars: dict[str, float] = field(default_factory=dict)
    zero_is_unseen: bool = False
    """Of the source's `Reading`."""
    num_update_elements: int = 0
    """Elements of the parameter sample, where there is one."""
    updates_forward: int = 1
    updates_backward: int = 1


def device_values(
    scalars: dict[str, torch.Tensor], reading: Reading | None, update: UpdateSums | None = None
) -> dict[str, torch.Tensor]:
    """All tensors of a step under the names by which `build_frame` finds them again."""
    values = {_SCALAR + name: tensor for name, tensor in scalars.items()}
    if update is not None:
        values.update(zip(_UPDATE, update.values, strict=True))
    if reading is not None:
        values.update({_COLUMN + name: tensor for name, tensor in reading.values.items() if name in COLUMN_DTYPES})
        values.update({_VALID + name: tensor for name, tensor in reading.valid.items()})
    return values


def build_frame(run: str, rank: int, note: StepNote, values: dict[str, npt.NDArray[Any]]) -> StepFrame:
    """The frame of a step whose numbers have arrived."""
    scalars = dict(note.scalars)
    packed: dict[str, Column] = {}
    if _UPDATE[0] in values:
        scalars.update(update_scalars([float(values[name]) for name in _UPDATE], note.num_update_elements))
    shared: bytes | None = None
    if note.zero_is_unseen and _COLUMN + "amax" in values:
        shared = columns.validity_bitmap(values[_COLUMN + "amax"] != 0)
    for name, array in values.items():
        if name.startswith(_SCALAR):
            scalars[name[len(_SCALAR) :]] = float(array)
        elif name.startswith(_COLUMN):
            column = name[len(_COLUMN) :]
            valid = values.get(_VALID + column)
            packed[column] = columns.pack(
                array, COLUMN_DTYPES[column], None if valid is None else valid.astype(np.bool_), bitmap=shared
            )  # fmt: skip
    high_precision = values.get(_COLUMN + "high_precision")
    if high_precision is not None and len(high_precision) == len(note.layout.columns):
        in_bf16 = {c.module for c, flag in zip(note.layout.columns, high_precision, strict=True) if flag}
        scalars["bf16_modules"] = float(len(in_bf16))
    return StepFrame(
        run=run, rank=rank, attempt=note.attempt, step=note.step, layout_id=note.layout.layout_id,
        time_unix=note.time_unix, scalars=scalars, columns=packed,
        updates_forward=note.updates_forward, updates_backward=note.updates_backward,
    )  # fmt: skip


class LayoutBook:
    """Keeps the layout in force and makes a new one when columns, recipe, attempt or what is unseen changes."""

    def __init__(self, run: str, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._columns: Sequence[TensorColumn] = ()
        self._unseen: list[str] = []
        self.current: Layout = self._layout(0, 0, 0)

    def update(self, found: Sequence[TensorColumn], unseen: list[str], num_unobserved: int, attempt: int) -> bool:
        """Take in what the source says now; True: `current` is a new layout that has to be announced.

        `unseen` is `name: reason`; `num_unobserved` of them are FP8 modules.
        """
        is_same = found is self._columns or (len(found) == len(self._columns) and list(found) == list(self._columns))
        if is_same and unseen == self._unseen and attempt == self.current.attempt:
            return False
        layout_id = self.current.layout_id + (not is_same)
        self._columns, self._unseen = found, list(unseen)
        self.current = self._layout(layout_id, attempt, num_unobserved)
        return True

    def _layout(self, layout_id: int, attempt: int, num_unobserved: int) -> Layout:
        observed = len({column.module for column in self._columns})
        return Layout(
            run=self._run, attempt=attempt, rank=self._rank, layout_id=layout_id, columns=list(self._columns),
            expected_modules=observed + num_unobserved, observed_modules=observed, not_observable=self._unseen,
        )  # fmt: skip
