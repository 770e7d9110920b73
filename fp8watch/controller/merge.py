"""From the frames of all ranks to one `Sample` per step: matched by module name, never by position.

Scalars: loss, loss_micro_median, update_rms, update_ratio, learning_rate and lr_factor are means over ranks (a
non-finite one stays non-finite), tokens and samples are sums, all others are maxima. Columns: amax is the maximum over
the ranks that observed it, the scale is that of the rank nearest to clipping (largest amax * scale), counts are sums.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch import columns, what_if
from fp8watch.detect.base import Mask, Sample
from fp8watch.records import Layout, StepFrame, TensorColumn

_MEANS = frozenset({"loss", "loss_micro_median", "update_rms", "update_ratio", "lr_factor", "learning_rate"})
_SUMS = frozenset({"tokens", "samples"})
_COUNTS = frozenset(
    {"quantized", "saturated", "underflowed", "nonfinite", "blocks", "clipped_blocks"}
    | {name for name, dtype in what_if.COLUMNS.items() if dtype == "u8"}
)
BEHIND_STEPS = 8
"""Steps by which a rank's frames may normally lag behind another's: that many are in flight from a GPU, and those in
flight when training pauses arrive when it continues."""
MAX_HELD_STEPS = 256
"""A step is closed without a rank that is this many steps behind the others. A rank holds at most this many frames
(`Settings.queue_frames`) for an absent agent, so older ones were dropped."""

Array = npt.NDArray[Any]


class Merger:
    """Collects the frames of one attempt. A step is complete when all expected ranks have passed it.

    A rank has passed a step when its frame of that step or of a later one has arrived: each rank's frames come in
    order, so skipped ones are lost. Ranks connect at different times and bring frames that have waited, so a rank that
    is merely behind is waited for. A caller with a clock may give it up (`leave`); its next frame makes it expected
    again.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.duplicates = 0
        """Frames that arrived twice."""
        self.unseen: Counter[str] = Counter()
        """Frames in no sample: missing (a later one of the rank arrived), late (their step was closed)."""
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._waiting: dict[int, dict[int, StepFrame]] = {}
        self._newest: dict[int, int] = {}
        """Rank -> newest step that it has passed."""
        self._gone: set[int] = set()
        self._is_heard_enough = False
        """Whether only ranks that were heard of in this attempt are waited for."""
        self.tensor_groups: dict[tuple[int, ...], None] = {}
        """Groups of ranks of this attempt that were declared to hold parts of the same tensors."""
        self._start = 0
        self._closed = 0

    def layout(self, layout: Layout) -> None:
        """Set a rank's order of columns."""
        self._layouts[layout.rank, layout.layout_id] = layout

    def restart(self, step: int) -> None:
        """Start a new attempt: frames after `step` are new again."""
        self._waiting.clear()
        self._layouts.clear()
        self._newest.clear()
        self.tensor_groups.clear()
        self._is_heard_enough = False
        self._start = self._closed = step

    def hand_back(self) -> None:
        """Forget the frames of incomplete steps as if they had not arrived: they will come again."""
        for frames in self._waiting.values():
            for rank in frames:
                self._newest[rank] = min(self._newest.get(rank, self._closed), self._closed)
        self._waiting.clear()

    def join(self, rank: int, step: int, tensor_group: Sequence[int] = ()) -> None:
        """A rank of this attempt is present (again); its first frame is of the step after `step`."""
        if len(tensor_group) > 1:
            self.tensor_groups[tuple(tensor_group)] = None
        self._gone.discard(rank)
        if self._closed == self._start and step < self._start:  # nothing is closed yet
            self._start = self._closed = step
        self._newest.setdefault(rank, step)

    def frame(self, frame: StepFrame) -> list[Sample]:
        """Add a frame; returns the samples that are now complete, in order of their steps."""
        rank, step = frame.rank, frame.step
        self._gone.discard(rank)
        if rank in self._waiting.get(step, {}):
            self.duplicates += 1
            return []
        newest = self._newest.get(rank, self._start)
        if step > newest + 1:
            self.unseen["missing"] += step - newest - 1
        self._newest[rank] = max(step, newest)
        if step <= self._closed:
            self.unseen["late"] += 1
        else:
            self._waiting.setdefault(step, {})[rank] = frame
        return self._complete()

    def leave(self, rank: int | None) -> list[Sample]:
        """Stop waiting for a rank, or (None) for all that were not heard of in this attempt; returns the samples that
        are complete without."""
        if rank is None:
            self._is_heard_enough = True
        else:
            self._gone.add(rank)
        return self._complete()

    def flush(self) -> list[Sample]:
        """No more frames will come: returns samples of everything that waits."""
        return [self._close(step) for step in sorted(self._waiting)]

    def held_by(self) -> tuple[int | None, list[int | None]]:
        """The oldest step that waits although others are `BEHIND_STEPS` further (None: none does), and the ranks it
        waits for. None among them stands for all that were not heard of: how many those are, only a rank has said."""
        if not self._waiting or max(self._waiting) - (step := min(self._waiting)) < BEHIND_STEPS:
            return None, []
        late = [rank for rank, newest in sorted(self._newest.items()) if newest < step and rank not in self._gone]
        is_one_unheard = len(self._newest.keys() | self._gone) < self.num_ranks and not self._is_heard_enough
        return step, [*late, *([None] if is_one_unheard else [])]

    def _complete(self) -> list[Sample]:
        ready = []
        while self._waiting:
            step = min(self._waiting)
            here = sum(newest >= step for rank, newest in self._newest.items() if rank not in self._gone)
            if here < self._num_expected() and max(self._waiting) - step < MAX_HELD_STEPS:
                break
            ready.append(self._close(step))
        return ready

    def _num_expected(self) -> int:
        """Number of ranks that a step waits for."""
        return len(self._newest.keys() - self._gone) if self._is_heard_enough else self.num_ranks - len(self._gone)

    def _close(self, step: int) -> Sample:
        frames = self._waiting.pop(step)
        self._closed = step
        return merge([frames[rank] for rank in sorted(frames)], self._layouts, expected_ranks=self.num_ranks)


def merge(frames: list[StepFrame], layouts: dict[tuple[int, int], Layout], *, expected_ranks: int = 1) -> Sample:
    """One sample from the frames of one step. A frame without a known layout adds only its scalars."""
    first = frames[0]
    extremes: dict[str, int] = {}
    scalars = _merge_scalars(frames, extremes)
    tensors, values, valid = _merge_columns(frames, layouts, extremes)
    return Sample(
        attempt=first.attempt,
        step=first.step,
        scalars=scalars,
        tensors=tensors,
        values=values,
        valid=valid,
        updates_forward=max(frame.updates_forward for frame in frames),
        updates_backward=max(frame.updates_backward for frame in frames),
        rank_of_extreme=extremes,
        num_ranks=len(frames),
        expected_ranks=expected_ranks,
        rank_median=_medians(frames),
        rank_values=_agreeing(frames),
    )


def _medians(frames: list[StepFrame]) -> dict[str, float]:
    """Scalar -> median over the ranks that have it (NaN counts as the largest); empty in a run of one rank."""
    if len(frames) == 1:
        return {}
    found = {}
    for name in {name: None for frame in frames for name in frame.scalars}:
        values = sorted(
            (value for frame in frames if (value := frame.scalars.get(name)) is not None),
            key=lambda value: math.inf if math.isnan(value) else value,
        )
        found[name] = values[(len(values) - 1) // 2]
    return found


def scale_checksum(frame: StepFrame) -> float | None:
    """CRC-32 of a step's scales, equal on ranks that use the same ones; None where some were not observed."""
    column = frame.columns.get("scale")
    return float(zlib.crc32(column.data)) if column is not None and column.valid is None else None


def precision_checksum(frame: StepFrame) -> float | None:
    """CRC-32 of which modules ran in high precision in a step; None where some were not observed."""
    column = frame.columns.get("high_precision")
    return float(zlib.crc32(column.data)) if column is not None and column.valid is None else None


def _agreeing(frames: list[StepFrame]) -> dict[str, dict[int, float]]:
    """Checksum -> rank -> value, in runs of several ranks: replicas must be equal to the bit."""
    if len(frames) == 1:
        return {}
    parameters = {f.rank: f.scalars["param_checksum"] for f in frames if "param_checksum" in f.scalars}
    scales = {f.rank: value for f in frames if (value := scale_checksum(f)) is not None}
    precision = {f.rank: value for f in frames if (value := precision_checksum(f)) is not None}
    return checksums(parameters, scales, precision)


def checksums(
    parameters: dict[int, float], scales: dict[int, float], precision: dict[int, float]
) -> dict[str, dict[int, float]]:
    """Checksum -> rank -> value, without checksums that no rank has."""
    found = {"param_checksum": parameters, "scale_checksum": scales, "precision_checksum": precision}
    return {name: values for name, values in found.items() if values}


def _merge_scalars(frames: list[StepFrame], extremes: dict[str, int]) -> dict[str, float]:
    if len(frames) == 1:
        return dict(frames[0].scalars)
    merged: dict[str, float] = {}
    for name in {name: None for frame in frames for name in frame.scalars}:
        pairs = [(frame.scalars[name], frame.rank) for frame in frames if name in frame.scalars]
        # Comparisons with NaN are false: a rank that has one is the extreme.
        worst, rank = next((p for p in pairs if math.isnan(p[0])), max(pairs))
        extremes[name] = rank
        if name in _SUMS:
            merged[name] = math.fsum(value for value, _ in pairs)
        elif name in _MEANS:
            merged[name] = sum(value for value, _ in pairs) / len(pairs)
        else:
            merged[name] = worst
        if name == "loss":
            merged["loss_max"] = worst
    return merged


def _merge_columns(
    frames: list[StepFrame], layouts: dict[tuple[int, int], Layout], extremes: dict[str, int]
) -> tuple[tuple[TensorColumn, ...], dict[str, Array], dict[str, Mask]]:
    known = [(frame, layouts.get((frame.rank, frame.layout_id))) for frame in frames]
    described = [(frame, layout) for frame, layout in known if layout is not None]
    if not described:
        return (), {}, {}
    if len(described) == 1:
        frame, layout = described[0]
        here = _unpacked(frame, len(layout.columns))
        return (
            tuple(layout.columns),
            {name: values for name, (values, _) in here.items()},
            {name: mask for name, (_, mask) in here.items()},
        )
    tensors: dict[str, TensorColumn] = {}
    for _, layout in described:
        for column in layout.columns:
            tensors.setdefault(column.name, column)
    index = {name: position for position, name in enumerate(tensors)}
    merged = _MergedColumns(len(index))
    for frame, layout in described:
        target = np.array([index[column.name] for column in layout.columns], dtype=np.int64)
        here = _unpacked(frame, len(target))
        for name, (data, mask) in here.items():
            if name != "scale":
                merged.add(name, target[mask], data[mask])
        # After a reduction across ranks, amax is the same on all of them.
        own = "amax_local" if "amax_local" in here else "amax"
        if own in here:
            data, mask = here[own]
            if mask.any() and np.max(data[mask]) >= np.max(merged.values[own]):
                extremes["amax"] = frame.rank
        if "scale" in here:
            data, mask = here["scale"]
            merged.add_scale(target, data, mask, here["amax"][0] if "amax" in here else np.ones_like(data))
    return tuple(tensors.values()), merged.values, merged.valid


def _unpacked(frame: StepFrame, size: int) -> dict[str, tuple[Array, Mask]]:
    """A frame's columns, without those that are not of its layout's length."""
    unpacked = {name: columns.unpack(column) for name, column in frame.columns.items()}
    return {name: pair for name, pair in unpacked.items() if len(pair[0]) == size}


class _MergedColumns:
    """The columns of several ranks on their way into one sample; position i belongs to the sample's tensor i."""

    def __init__(self, size: int) -> None:
        self.values: dict[str, Array] = {}
        self.valid: dict[str, Mask] = {}
        self._size = size
        self._nearest = np.full(size, -np.inf)

    def add(self, name: str, spots: Array, data: Array) -> None:
        """Add one rank's observed values: counts are summed, of all else the largest is kept (of snr the smallest)."""
        held, seen = self._column(name, data.dtype)
        if name in _COUNTS:
            held[spots] += data
        else:
            pick = np.fmin if name.endswith("snr") else np.maximum
            held[spots] = np.where(seen[spots], pick(held[spots], data), data)
        seen[spots] = True

    def add_scale(self, spots: Array, scale: Array, mask: Mask, amax: Array) -> None:
        """Add one rank's scales: that of the rank nearest to clipping is kept."""
        with np.errstate(all="ignore"):
            product = np.where(np.isfinite(amax * scale), amax * scale, np.inf)
        held, seen = self._column("scale", scale.dtype)
        better = mask & (product > self._nearest[spots])
        held[spots[better]] = scale[better]
        self._nearest[spots[better]] = product[better]
        seen[spots[mask]] = True

    def _column(self, name: str, dtype: Any) -> tuple[Array, Mask]:
        held = self.values.setdefault(name, np.zeros(self._size, dtype=dtype))
        return held, self.valid.setdefault(name, np.zeros(self._size, dtype=np.bool_))
