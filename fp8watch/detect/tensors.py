"""Shared by the per-tensor detectors: a layout's constants, observed columns, and short histories per tensor.

A frame has thousands of tensors and every detector runs in every step, so neither this module nor a detector loops over
tensors in Python. What depends on the layout alone is computed once (`table_of`); the rest is numpy over all tensors.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample
from fp8watch.formats import FORMATS
from fp8watch.records import TensorColumn

Array = np.ndarray[Any, Any]

KEEP_TABLES = 8
"""Layouts remembered: those of the runs that one controller follows at the same time."""
SPREAD = 8
"""Every tensor's median is renewed once in this many steps; see `Rows.screen`."""
YOUNG = 16
"""A row with fewer values than this has its median renewed in every step."""


class Table:
    """What follows from the columns alone: arrays with one element per tensor, and the names as one list object."""

    __slots__ = ("columns", "delayed", "is_e4m3", "is_grad", "is_max", "is_weight", "kinds", "lengths", "names", "top",
                 "top_with_margin")  # fmt: skip

    def __init__(self, columns: tuple[TensorColumn, ...]) -> None:
        self.columns = columns
        self.names = [column.name for column in columns]
        """`module:tensor`."""
        tops = [FORMATS[column.fp8_format].max for column in columns]
        self.top = np.array(tops, dtype=np.float64)
        """Largest number of the tensor's format."""
        self.top_with_margin = self.top * 2.0 ** -np.array([column.margin for column in columns], dtype=np.float64)
        self.lengths = np.array([max(1, column.history_len) for column in columns], dtype=np.int64)
        self.is_weight = np.array([column.tensor == "weight" for column in columns], dtype=np.bool_)
        self.is_grad = np.array([column.tensor.startswith("grad") for column in columns], dtype=np.bool_)
        self.delayed = np.array([column.recipe == "delayed" for column in columns], dtype=np.bool_)
        self.is_max = np.array([column.amax_compute_algo == "max" for column in columns], dtype=np.bool_)
        self.is_e4m3 = np.array([column.fp8_format.startswith("e4m3") for column in columns], dtype=np.bool_)
        order = {kind: i for i, kind in enumerate(sorted({column.tensor for column in columns}))}
        self.kinds = np.array([order[column.tensor] for column in columns], dtype=np.int64)
        """A number for each kind of tensor (input, weight, ...)."""


_tables: list[Table] = []


def table_of(sample: Sample) -> Table:
    """The constants of the sample's layout; computed once for equal columns (a memo, not state)."""
    columns = sample.tensors
    for table in _tables:
        if table.columns is columns:
            return table
    for table in _tables:  # equal columns of another frame: element by element, at once where they are the same objects
        if table.columns == columns:
            return table
    table = Table(columns)
    _tables.insert(0, table)
    del _tables[KEEP_TABLES:]
    return table


def observed(sample: Sample, name: str) -> tuple[Array, Array] | None:
    """Values (float64) and which of them were observed; None when the step does not have the column."""
    values = sample.values.get(name)
    if values is None or not len(values):
        return None
    valid = sample.valid.get(name)
    mask = np.ones(len(values), dtype=np.bool_) if valid is None else valid.astype(np.bool_, copy=False)
    return values.astype(np.float64), mask


def share_of(sample: Sample, name: str, high: Array) -> tuple[Array, Array] | None:
    """[num_tensors] share of a tensor's quantized elements that column `name` counts (0 where unknown), and where it is
    known; None on steps without counts. `high`: see `high_precision`."""
    counted, quantized = observed(sample, name), observed(sample, "quantized")
    if counted is None or quantized is None:
        return None
    usable = counted[1] & quantized[1] & (quantized[0] > 0) & ~high
    return np.where(usable, counted[0] / np.maximum(quantized[0], 1), 0.0), usable


def high_precision(sample: Sample) -> Array:
    """[num_tensors] True where the module ran in BF16 in this step."""
    flags = sample.values.get("high_precision")
    return np.zeros(len(sample.tensors), np.bool_) if flags is None else flags.astype(np.bool_)


def carried(values: Array, rows: Array, fill: Any) -> Array:
    """`values` in a new order: element i comes from `rows[i]`, or is `fill` where that is -1."""
    kept = np.full((len(rows), *values.shape[1:]), fill, dtype=values.dtype)
    kept[rows >= 0] = values[rows[rows >= 0]]
    return kept


def rows_of(names: list[str], old: list[str]) -> Array:
    """[len(names)] index of each name in `old`, -1 where it is new."""
    index = {name: i for i, name in enumerate(old)}
    return np.array([index.get(name, -1) for name in names], dtype=np.int64)


def moved(names: list[str], old: list[str]) -> Array | None:
    """`rows_of(names, old)` when the layout has changed; None when it has not."""
    return None if names is old or names == old else rows_of(names, old)


class Rows(msgspec.Struct):
    """The newest values of each tensor, in one ring per tensor; NaN where nothing was observed."""

    names: list[str] = []
    values: Array = msgspec.field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    """[num_tensors, length] float32, in ring order."""
    position: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """[num_tensors] where the next value goes."""
    held: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """[num_tensors] how many values of each row are not NaN."""
    medians: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """[num_tensors] median as of the row's last turn in `screen`, NaN before the first."""
    turn: int = 0

    def follow(self, names: list[str], length: int) -> None:
        """Match the sample's tensors by name; new ones start empty."""
        if names is self.names and self.values.shape[1] == length:
            return
        if self.values.shape[1] != length:
            self.names, self.values = [], np.zeros((0, length), dtype=np.float32)
        elif names == self.names:
            self.names = names
            return
        rows = rows_of(names, self.names)
        self.values = carried(self.values, rows, np.nan)
        self.position, self.held = carried(self.position, rows, 0), carried(self.held, rows, 0)
        self.medians = carried(self.medians, rows, np.nan)
        self.names = names

    def push(self, values: Array, mask: Array | None = None) -> None:
        """Append one value of `values` ([num_tensors]) to each row (where `mask` is set); the oldest falls out."""
        length = self.values.shape[1]
        rows = np.arange(len(values)) if mask is None or mask.all() else np.flatnonzero(mask)
        if len(rows) < len(values):
            values = values[rows]
        at = self.position[rows]
        self.held[rows] += np.isfinite(values).astype(np.int32) - np.isfinite(self.values[rows, at])
        self.values[rows, at] = values
        self.position[rows] = (at + 1) % length

    def last(self) -> Array:
        """[num_tensors] the newest value, NaN where there is none."""
        newest: Array = self.values[np.arange(len(self.position)), self.position - 1]
        return newest

    def median(self, rows: Array) -> Array:
        """[len(rows)] exact medians of the values held, NaN where there are none."""
        # Sorting puts NaN last, so the middle of the first `held` values is the median (numpy's nanmedian costs 20x).
        ordered, count = np.sort(self.values[rows], axis=1), self.held[rows]
        at = np.arange(len(rows))
        low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, self.values.shape[1] - 1)
        result: Array = (ordered[at, low].astype(np.float64) + ordered[at, high]) / 2
        return result

    def screen(self) -> Array:
        """[num_tensors] medians, each at most `SPREAD` - 1 steps old: good enough to select rows, not to judge them.

        Exact medians of all rows in every step would be too expensive. A row is renewed in every eighth step, and in
        every step while it has fewer than `YOUNG` values. For a row that stands out, ask for its exact `median`.
        """
        self.turn = (self.turn + 1) % SPREAD
        rows = np.arange(self.turn, len(self.medians), SPREAD)
        young = self.held < YOUNG
        if young.any():
            rows = np.union1d(rows, np.flatnonzero(young & (self.held > 0)))
        self.medians[rows] = self.median(rows)
        return self.medians
