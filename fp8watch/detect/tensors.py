"""Small helpers that the per-tensor detectors share: observed columns, and state that follows a layout."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample

Array = np.ndarray[Any, Any]


def observed(sample: Sample, name: str) -> tuple[Array, Array] | None:
    """Values (float64) and which were observed; None when the column is absent from the step."""
    values = sample.values.get(name)
    if values is None or not len(values):
        return None
    valid = sample.valid.get(name)
    mask = np.ones(len(values), dtype=np.bool_) if valid is None else valid.astype(np.bool_)
    return values.astype(np.float64), mask


def names_of(sample: Sample) -> list[str]:
    """`module:tensor` of every column."""
    return [column.name for column in sample.tensors]


class Rows(msgspec.Struct):
    """A short history of one value a tensor, newest last, NaN where nothing was observed."""

    names: list[str] = []
    values: Array = msgspec.field(default_factory=lambda: np.zeros((0, 0)))
    """[num_tensors, length] float64."""

    def follow(self, names: list[str], length: int) -> None:
        """Match the sample's tensors by name; new ones start empty."""
        if names == self.names and self.values.shape == (len(names), length):
            return
        old = {name: i for i, name in enumerate(self.names)}
        values = np.full((len(names), length), np.nan)
        for i, name in enumerate(names):
            if name in old and self.values.shape[1] == length:
                values[i] = self.values[old[name]]
        self.names, self.values = list(names), values

    def push(self, rows: Array, values: Array) -> None:
        """Append one value to each of `rows`, the oldest falls out."""
        self.values[rows, :-1] = self.values[rows, 1:]
        self.values[rows, -1] = values

    def clear(self) -> None:
        """Forget everything."""
        self.values[:] = np.nan

    def count(self) -> Array:
        """[num_tensors] how many values are held."""
        held: Array = np.isfinite(self.values).sum(axis=1)
        return held

    def median(self) -> Array:
        """[num_tensors] median of what is held, NaN where nothing is."""
        # Sorting puts NaN last, so that the middle of the first `count` is the median (numpy's nanmedian costs 20x).
        ordered, count = np.sort(self.values, axis=1), self.count()
        result = np.full(len(self.names), np.nan)
        rows = np.flatnonzero(count)
        low, high = (count[rows] - 1) // 2, count[rows] // 2
        result[rows] = (ordered[rows, low] + ordered[rows, high]) / 2
        return result
