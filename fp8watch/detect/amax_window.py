"""Our own copy of every tensor's amax history, from which the correct scale can be computed.

Delayed scaling takes its scale from the last `history_len` updates with a non-zero amax. A window is *complete* when we
have seen that many updates, or every update since the state was created. Entries carry their step, so that a rollback
can take back exactly what it undid.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class AmaxWindows:
    """Rings of amax, one per tensor; row i belongs to `names[i]`. (Not a struct: `packed` defines the encoding.)"""

    __slots__ = (
        "amax", "count", "from_start", "infinite", "lengths", "names", "nan", "peak", "position", "steps",
        "thinned_until",
    )  # fmt: skip

    def __init__(self, num: int = 0, size: int = 1) -> None:
        self.names: list[str] = []
        self.lengths: Array = np.zeros(num, dtype=np.int64)
        """history_len of each tensor."""
        self.amax: Array = np.zeros((num, size), dtype=np.float32)
        """[num_tensors, longest length]; empty slots are 0."""
        self.steps: Array = np.zeros((num, size), dtype=np.int64)
        self.position: Array = np.zeros(num, dtype=np.int64)
        """Where the next entry goes."""
        self.count: Array = np.zeros(num, dtype=np.int64)
        """Slots in use, at most `lengths`."""
        self.from_start: Array = np.zeros(num, dtype=np.bool_)
        """True: the library's window holds nothing older than our oldest entry (we saw the run's first step)."""
        self.peak: Array = np.zeros(num, dtype=np.float32)
        """Largest finite entry of each tensor, 0 where there is none."""
        self.infinite: Array = np.zeros(num, dtype=np.int64)
        """Number of infinite entries: each freezes a `max` scale until it leaves the window."""
        self.nan: Array = np.zeros(num, dtype=np.int64)
        """Number of NaN entries: some kernels ignore them, others freeze the scale."""
        self.thinned_until = -1
        """Step up to which `unpacked` left out entries that a later one exceeds (see `packed`); -1: none left out."""

    def remap(self, names: list[str], lengths: Array, *, from_start: bool) -> None:
        """Follow a new layout: tensors are matched by name, the newest entries are kept, new ones start empty."""
        size = int(lengths.max(initial=1))
        old = {name: i for i, name in enumerate(self.names)}
        before, fresh = AmaxWindows(), AmaxWindows(len(names), size)
        for slot in self.__slots__:
            setattr(before, slot, getattr(self, slot))
            setattr(self, slot, getattr(fresh, slot))
        self.names, self.lengths = list(names), lengths.astype(np.int64)
        self.from_start[:] = from_start
        self.thinned_until = before.thinned_until
        for i, name in enumerate(names):
            if name not in old:
                continue
            values, steps = before.newest(old[name])
            keep = min(len(values), int(lengths[i]))
            self._write(i, values[len(values) - keep :], steps[len(steps) - keep :])
            # A window longer than before may hold entries that we no longer have.
            self.from_start[i] = before.from_start[old[name]] and len(values) == keep

    def newest(self, row: int) -> tuple[Array, Array]:
        """Amax and steps of one tensor, oldest first."""
        count, length = int(self.count[row]), int(self.lengths[row])
        order = (int(self.position[row]) - count + np.arange(count)) % length
        return self.amax[row, order], self.steps[row, order]

    def push(self, rows: Array, amax: Array, step: int) -> None:
        """Enter one update of the tensors `rows` (indices)."""
        at = self.position[rows]
        leaving = self.amax[rows, at]
        full = self.count[rows] == self.lengths[rows]
        # Once an entry falls out, completeness no longer rests on having seen the beginning.
        self.from_start[rows[full]] = False
        self.amax[rows, at], self.steps[rows, at] = amax, step
        self.position[rows] = (at + 1) % self.lengths[rows]
        self.count[rows] = np.minimum(self.count[rows] + 1, self.lengths[rows])
        finite = np.where(np.isfinite(amax), amax, 0.0)
        self.peak[rows] = np.maximum(self.peak[rows], finite)
        # The whole ring is scanned only where the largest entry or a non-finite one has left it.
        stale = full & ((leaving >= self.peak[rows]) | ~np.isfinite(leaving))
        self.infinite[rows] += np.isinf(amax)
        self.nan[rows] += np.isnan(amax)
        self._refresh(rows[stale])

    def is_complete(self) -> Array:
        """[num_tensors] True where our window holds everything that the library's window holds."""
        complete: Array = (self.from_start | (self.count == self.lengths)) & (self.count > 0)
        return complete

    def latest(self) -> Array:
        """[num_tensors] newest entry, 0 where there is none; may be non-finite."""
        if not self.names:
            return np.zeros(0, dtype=np.float32)
        last = self.amax[np.arange(len(self.names)), (self.position - 1) % self.lengths]
        return np.where(self.count > 0, last, np.float32(0))

    def shorten(self, row: int, keep: int) -> None:
        """Keep only the newest `keep` entries of a tensor, because the library's window was purged."""
        values, steps = self.newest(row)
        self._write(row, values[len(values) - keep :], steps[len(steps) - keep :])
        self.from_start[row] = True

    def forget(self, rows: Array) -> None:
        """Start again with an unknown past."""
        self.amax[rows] = 0.0
        self.count[rows], self.position[rows], self.from_start[rows] = 0, 0, False
        self.peak[rows], self.infinite[rows], self.nan[rows] = 0.0, 0, 0

    def cut(self, step: int) -> None:
        """Roll back to `step`: drop later entries. Entries that had already fallen out of our ring stay unknown."""
        if step < self.thinned_until:
            # The entries dropped now had hidden smaller ones that `packed` left out: those are the window, and unknown.
            self.forget(np.arange(len(self.names)))
            self.thinned_until = -1
            return
        for row in range(len(self.names)):
            values, steps = self.newest(row)
            keep = int((steps <= step).sum())
            if keep < len(values):
                self._write(row, values[:keep], steps[:keep])

    def packed(self) -> list[Any]:
        """The input of `unpacked`, a hundredth of the size: only entries that no later entry of their window exceeds.

        Entries leave in order, so only these can ever become the largest of the window as it moves on.
        """
        num, size = self.amax.shape
        age = np.arange(size)
        if num and (self.position == self.position[0]).all() and (self.lengths == size).all():
            column = (self.position[0] - 1 - age) % size  # the usual case, five times as fast
            order, values = np.broadcast_to(column, (num, size)), self.amax[:, column]
        else:
            order = (self.position[:, None] - 1 - age[None, :]) % np.maximum(self.lengths, 1)[:, None]
            values = np.take_along_axis(self.amax, order, axis=1)
        held = age[None, :] < self.count[:, None]
        finite = np.where(held & np.isfinite(values), values, np.float32(-1))
        newer = np.full_like(finite, -1)
        newer[:, 1:] = np.maximum.accumulate(finite, axis=1)[:, :-1]
        rows, ages = np.nonzero(held & ((finite > newer) | ~np.isfinite(values) | (age[None, :] == 0)))
        slots = order[rows, ages]
        steps = self.steps[rows, slots]
        arrays = (
            self.lengths, self.position, self.count, self.from_start, rows.astype(np.int32), slots.astype(np.int32),
            self.amax[rows, slots], steps,
        )  # fmt: skip
        until = max(self.thinned_until, int(steps.max(initial=-1)))
        return [self.names, num, size, until, *([a.dtype.str, np.ascontiguousarray(a).tobytes()] for a in arrays)]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> AmaxWindows:
        """Windows that continue as the packed ones would; after a rollback to before the packing they are unknown."""
        names, num, size, until, *rest = packed
        lengths, position, count, from_start, rows, slots, amax, steps = (
            np.frombuffer(data, dtype=np.dtype(kind)).copy() for kind, data in rest
        )
        windows = cls(num, size)
        windows.names, windows.thinned_until = names, until
        windows.lengths, windows.position, windows.count, windows.from_start = lengths, position, count, from_start
        windows.amax[rows, slots], windows.steps[rows, slots] = amax, steps
        windows._refresh(np.arange(num))
        return windows

    def _write(self, row: int, values: Array, steps: Array) -> None:
        keep = len(values)
        values, steps = values.copy(), steps.copy()
        self.amax[row] = 0.0
        self.amax[row, :keep], self.steps[row, :keep] = values, steps
        self.count[row], self.position[row] = keep, keep % int(self.lengths[row])
        self._refresh(np.asarray([row]))

    def _refresh(self, rows: Array) -> None:
        held = self.amax[rows]
        self.infinite[rows], self.nan[rows] = np.isinf(held).sum(axis=1), np.isnan(held).sum(axis=1)
        self.peak[rows] = np.where(np.isfinite(held), held, 0.0).max(axis=1, initial=0.0)
