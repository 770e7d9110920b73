"""Makes the records on the wire (layouts and step frames of one rank) from the values that the ring delivers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from fp8watch import columns, what_if
from fp8watch.capture.arrived import Arrived
from fp8watch.capture.ring import Given
from fp8watch.capture.source import Pieces, Reading
from fp8watch.capture.update_size import UpdateSums, update_scalars
from fp8watch.records import Column, Layout, StepFrame, TensorColumn

COLUMN_DTYPES = {
    "amax": "f4", "amax_last": "f4", "amax_local": "f4", "scale": "f4", "mse": "f4", "snr": "f4",
    "high_precision": "u1", "quantized": "u8", "saturated": "u8", "underflowed": "u8", "nonfinite": "u8",
    "shadow_error": "f4", "blocks": "u8", "clipped_blocks": "u8", "scale_spread": "f4",
    **what_if.COLUMNS,
}  # fmt: skip
"""Type of each per-tensor column on the wire; see `fp8watch.records.StepFrame`."""

_SCALAR, _COLUMN, _VALID = "s:", "c:", "v:"
"""Prefixes of names, two characters each."""
_HIGH_PRECISION = _COLUMN + "high_precision"
_UPDATE = [f"update {i}" for i in range(5)]


class StepNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the host knows when a step's copy starts; kept with the copy."""

    step: int
    attempt: int
    layout: Layout
    time_unix: float
    scalars: dict[str, float] = {}
    zero_is_unseen: bool = False
    """See `fp8watch.capture.source.Reading`."""
    places: npt.NDArray[np.int64] | None = None
    """Of the columns' elements in what arrives; see `fp8watch.capture.source.Places`. None: they are all."""
    num_update_elements: int = 0
    """Elements of the parameter sample, if there is one."""
    updates_forward: int = 1
    updates_backward: int = 1


def device_values(
    scalars: dict[str, torch.Tensor], reading: Reading | None, update: UpdateSums | None = None
) -> dict[str, Given]:
    """All tensors of a step under the names by which `build_frame` looks them up."""
    values: dict[str, Given] = {}
    if reading is not None:
        held: Mapping[str, Given] = reading.values.parts if isinstance(reading.values, Pieces) else reading.values
        for name, given in held.items():
            if name in COLUMN_DTYPES:
                values[_COLUMN + name] = given
        for name, tensor in reading.valid.items():
            values[_VALID + name] = tensor
    if update is not None:
        values.update(zip(_UPDATE, update.values, strict=True))
    for name, tensor in scalars.items():
        values[_SCALAR + name] = tensor
    return values


class FrameParts(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose numbers have arrived; see `fp8watch.transport.pending.Parts`."""

    run: str
    rank: int
    note: StepNote
    values: Arrived

    def frame(self) -> StepFrame:
        """The record on the wire."""
        return build_frame(self.run, self.rank, self.note, self.values)

    def scalars(self) -> dict[str, float]:
        """The frame's scalars, except those derived from columns."""
        return _scalars(self.note, self.values)


def _scalars(note: StepNote, values: Arrived) -> dict[str, float]:
    found = dict(note.scalars)
    if _UPDATE[0] in values:
        found.update(update_scalars([values.number(name) for name in _UPDATE], note.num_update_elements))
    found.update((name[2:], values.number(name)) for name in values if name[:2] == _SCALAR)
    return found


def build_frame(run: str, rank: int, note: StepNote, values: Arrived) -> StepFrame:
    """The frame of a step whose numbers have arrived."""
    scalars = _scalars(note, values)
    packed: dict[str, Column] = {}
    shared: bytes | None = None
    places = slice(None) if note.places is None else note.places
    if note.zero_is_unseen and _COLUMN + "amax" in values:
        shared = columns.validity_bitmap(values[_COLUMN + "amax"][places] != 0)
    for name in values:
        if name[:2] == _COLUMN:
            key = name[2:]
            valid = _VALID + key
            bitmap = columns.validity_bitmap(values[valid].astype(np.bool_)) if valid in values else shared
            data = values.raw(name) if note.places is None else values[name][note.places].tobytes()
            packed[key] = columns.pack_raw(data, values.segments[name].dtype, COLUMN_DTYPES[key], bitmap)
    if _HIGH_PRECISION in values and len(flags := values[_HIGH_PRECISION]) == len(note.layout.columns):
        in_bf16 = {c.module for c, flag in zip(note.layout.columns, flags, strict=True) if flag}
        scalars["bf16_modules"] = float(len(in_bf16))
    return StepFrame(
        run=run, rank=rank, attempt=note.attempt, step=note.step, layout_id=note.layout.layout_id,
        time_unix=note.time_unix, scalars=scalars, columns=packed,
        updates_forward=note.updates_forward, updates_backward=note.updates_backward,
    )  # fmt: skip


class LayoutBook:
    """Keeps the current layout; makes a new one when columns, recipe, attempt or the unobserved modules change."""

    def __init__(self, run: str, rank: int, aliases: dict[str, list[str]] | None = None) -> None:
        """`aliases`: see `fp8watch.records.Layout`."""
        self._aliases = aliases or {}
        self._run = run
        self._rank = rank
        self._columns: Sequence[TensorColumn] = ()
        self._unseen: list[str] = []
        self.current: Layout = self._layout(0, 0, 0)

    def update(self, found: Sequence[TensorColumn], unseen: list[str], num_unobserved: int, attempt: int) -> bool:
        """Take what the source reports now; True: `current` is a new layout that has to be announced.

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
            aliases=self._aliases,
        )  # fmt: skip
