"""From the frames of all ranks to one `Sample` a step: matched by module name, never by position.

Scalars: loss, loss_micro_median, update_rms and update_ratio are means over ranks (a non-finite one stays non-finite),
tokens and samples are sums, the rest is the largest. Columns: amax is the largest over the ranks that observed it, the
scale is that of the rank nearest to clipping (largest amax * scale), counts are sums.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch import columns, what_if
from fp8watch.detect.base import Sample
from fp8watch.records import Layout, StepFrame, TensorColumn

_MEANS = frozenset({"loss", "loss_micro_median", "update_rms", "update_ratio", "lr_factor", "learning_rate"})
_SUMS = frozenset({"tokens", "samples"})
_COUNTS = frozenset(
    {"quantized", "saturated", "underflowed", "nonfinite", "blocks", "clipped_blocks"}
    | {name for name, dtype in what_if.COLUMNS.items() if dtype == "u8"}
)
BEHIND_STEPS = 8
"""Steps that a rank's frames may lag behind another's for a good reason: that many are in flight from a GPU, and what
is in flight when training pauses comes when it goes on."""
MAX_HELD_STEPS = 256
"""A step is closed without a rank that is this many steps behind the others: a rank holds no more frames than that
(`Settings.queue_frames`) for an agent that is not there, so what is older was dropped."""

Array = npt.NDArray[Any]


class Merger:
    """Collects frames of one attempt; a step is complete when all expected ranks are through with it.

    A rank is through with a step when its frame is here, or one of a later step: each rank's frames come in order, so
    what it skipped is lost. Ranks connect at different times and bring what has waited, so one that is merely behind
    is waited for; whoever has a clock may give it up (`leave`), and its next frame has it expected again.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.duplicates = 0
        """Frames that came twice."""
        self.unseen: Counter[str] = Counter()
        """Frames that no sample holds: missing (a later one of the rank came), late (their step was closed)."""
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._waiting: dict[int, dict[int, StepFrame]] = {}
        self._newest: dict[int, int] = {}
        """Rank -> newest step that it is through with."""
        self._gone: set[int] = set()
        self.tensor_groups: dict[tuple[int, ...], None] = {}
        """Ranks of this attempt that were declared to hold parts of the same tensors."""
        self._start = 0
        self._closed = 0

    def layout(self, layout: Layout) -> None:
        """Announce a rank's order of columns."""
        self._layouts[layout.rank, layout.layout_id] = layout

    def restart(self, step: int) -> None:
        """A new attempt: frames after `step` are new again."""
        self._waiting.clear()
        self._layouts.clear()
        self._newest.clear()
        self.tensor_groups.clear()
        self._start = self._closed = step

    def hand_back(self) -> None:
        """Forget the frames of steps that are not complete, as if they had not come: they will come again."""
        for frames in self._waiting.values():
            for rank in frames:
                self._newest[rank] = min(self._newest.get(rank, self._closed), self._closed)
        self._waiting.clear()

    def join(self, rank: int, step: int, tensor_group: Sequence[int] = ()) -> None:
        """A rank of this attempt is there (again); its first frame is of the step after `step`."""
        if len(tensor_group) > 1:
            self.tensor_groups[tuple(tensor_group)] = None
        self._gone.discard(rank)
        if self._closed == self._start and step < self._start:  # nothing is closed yet
            self._start = self._closed = step
        self._newest.setdefault(rank, step)

    def frame(self, frame: StepFrame) -> list[Sample]:
        """Take a frame in; the samples that are complete now, in order of their steps."""
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

    def leave(self, rank: int) -> list[Sample]:
        """Do not wait for a rank any more; the samples that are complete without it."""
        self._gone.add(rank)
        return self._complete()

    def flush(self) -> list[Sample]:
        """No more frames will come: the samples of whatever waits."""
        return [self._close(step) for step in sorted(self._waiting)]

    def held_by(self, ranks: Iterable[int]) -> tuple[int | None, list[int]]:
        """The oldest step that waits though others are `BEHIND_STEPS` further (None: none does), and which of `ranks`
        it waits for."""
        if not self._waiting or max(self._waiting) - (step := min(self._waiting)) < BEHIND_STEPS:
            return None, []
        return step, [rank for rank in ranks if rank not in self._gone and self._newest.get(rank, -1) < step]

    def _complete(self) -> list[Sample]:
        ready = []
        while self._waiting:
            step = min(self._waiting)
            here = sum(newest >= step for rank, newest in self._newest.items() if rank not in self._gone)
            if here < self.num_ranks - len(self._gone) and max(self._waiting) - step < MAX_HELD_STEPS:
                break
            ready.append(self._close(step))
        return ready

    def _close(self, step: int) -> Sample:
        frames = self._waiting.pop(step)
        self._closed = step
        return merge([frames[rank] for rank in sorted(frames)], self._layouts, expected_ranks=self.num_ranks)


def merge(frames: list[StepFrame], layouts: dict[tuple[int, int], Layout], *, expected_ranks: int = 1) -> Sample:
    """One sample from the frames of one step. A frame without a known layout adds its scalars only."""
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
    """Scalar -> median over the ranks that have it, in runs of several; a NaN counts as the largest."""
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
    """CRC-32 of a step's scales, the same on ranks that use the same ones; None where some were not observed."""
    column = frame.columns.get("scale")
    return float(zlib.crc32(column.data)) if column is not None and column.valid is None else None


def precision_checksum(frame: StepFrame) -> float | None:
    """CRC-32 of which modules ran in high precision in a step; None where some were not observed."""
    column = frame.columns.get("high_precision")
    return float(zlib.crc32(column.data)) if column is not None and column.valid is None else None


def _agreeing(frames: list[StepFrame]) -> dict[str, dict[int, float]]:
    """Checksum -> rank -> value, in runs of several ranks: what replicas have in common, to the bit."""
    if len(frames) == 1:
        return {}
    parameters = {f.rank: f.scalars["param_checksum"] for f in frames if "param_checksum" in f.scalars}
    scales = {f.rank: value for f in frames if (value := scale_checksum(f)) is not None}
    precision = {f.rank: value for f in frames if (value := precision_checksum(f)) is not None}
    return checksums(parameters, scales, precision)


def checksums(
    parameters: dict[int, float], scales: dict[int, float], precision: dict[int, float]
) -> dict[str, dict[int, float]]:
    """Checksum -> rank -> value, without those that no rank has."""
    found = {"param_checksum": parameters, "scale_checksum": scales, "precision_checksum": precision}
    return {name: values for name, values in found.items() if values}


def _merge_scalars(frames: list[StepFrame], extremes: dict[str, int]) -> dict[str, float]:
    if len(frames) == 1:
        return dict(frames[0].scalars)
    merged: dict[str, float] = {}
    for name in {name: None for frame in frames for name in frame.scalars}:
        pairs = [(frame.scalars[name], frame.rank) for frame in frames if name in frame.scalars]
        # NaN compares with nothing: a rank that has one is the extreme.
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
) -> tuple[tuple[TensorColumn, ...], dict[str, Array], dict[str, npt.NDArray[np.bool_]]]:
    known = [(frame, layouts.get((frame.rank, frame.layout_id))) for frame in frames]
    described = [(frame, layout) for frame, layout in known if layout is not None]
    if not described:
        return (), {}, {}
    if len(described) == 1:
        frame, layout = described[0]
        size = len(layout.columns)
        unpacked = {name: columns.unpack(column) for name, column in frame.columns.items()}
        fitting = {name: pair for name, pair in unpacked.items() if len(pair[0]) == size}
        return (
            tuple(layout.columns),
            {name: values for name, (values, _) in fitting.items()},
            {name: mask for name, (_, mask) in fitting.items()},
        )
    tensors: dict[str, TensorColumn] = {}
    for _, layout in described:
        for column in layout.columns:
            tensors.setdefault(column.name, column)
    index = {name: position for position, name in enumerate(tensors)}
    values: dict[str, Array] = {}
    valid: dict[str, npt.NDArray[np.bool_]] = {}
    nearest = np.full(len(index), -np.inf)
    for frame, layout in described:
        target = np.array([index[column.name] for column in layout.columns], dtype=np.int64)
        here = {name: columns.unpack(column) for name, column in frame.columns.items()}
        here = {name: pair for name, pair in here.items() if len(pair[0]) == len(target)}
        for name, (data, mask) in here.items():
            if name == "scale":
                continue
            held = values.setdefault(name, np.zeros(len(index), dtype=data.dtype))
            seen = valid.setdefault(name, np.zeros(len(index), dtype=np.bool_))
            spots, news = target[mask], data[mask]
            if name in _COUNTS:
                held[spots] += news
            else:
                pick = np.fmin if name.endswith("snr") else np.maximum
                held[spots] = np.where(seen[spots], pick(held[spots], news), news)
            # After a reduction across ranks amax is the same on all of them.
            own = "amax_local" if "amax_local" in here else "amax"
            if name == own and len(news) and np.max(news) >= np.max(held):
                extremes["amax"] = frame.rank
            seen[spots] = True
        if "scale" in here:
            data, mask = here["scale"]
            amax = here["amax"][0] if "amax" in here else np.ones_like(data)
            with np.errstate(all="ignore"):
                product = np.where(np.isfinite(amax * data), amax * data, np.inf)
            held = values.setdefault("scale", np.zeros(len(index), dtype=data.dtype))
            seen = valid.setdefault("scale", np.zeros(len(index), dtype=np.bool_))
            better = mask & (product > nearest[target])
            held[target[better]] = data[better]
            nearest[target[better]] = product[better]
            seen[target[mask]] = True
    return tuple(tensors.values()), values, valid
