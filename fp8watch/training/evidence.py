"""What a rank has seen itself: the second opinion before something drastic is done to a run.

A rollback, BF16 for the whole model or a halt rests on findings that were made elsewhere, from frames that somebody
may have forged. So a rank that is asked for one looks at the frames it sent itself, and refuses when nothing in them
is out of the ordinary. Where the order names another rank as the one concerned, this one has nothing to say, because
a loss, an activation or a faulty device may be that rank's alone.

Evidence, in the steps since the onset that the order names, is any of:
- a loss, gradient norm or parameter that is not finite, or an update that was left out;
- loss, gradient norm or the update's size further from the median of the steps before than `SIGMAS` robust standard
  deviations (1.4826 times the median absolute deviation, of logarithms), in one step or in the mean of the last few;
- of a tensor that is named: a scale or amax that is not a positive number, values beyond the format's largest, amax
  an octave and `SIGMAS` deviations off its own median, a share of underflow or saturation above `SHARE`, or a scale
  more than an octave from the one that the largest amax of the window demands.

With fewer than `MIN_STEPS` steps to compare with there is no ordinary to be out of, and nothing is refused.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from fp8watch import columns
from fp8watch.formats import FORMATS
from fp8watch.records import Command, Layout
from fp8watch.transport.pending import PendingFrame

DRASTIC = frozenset({"rollback", "bf16_all", "halt"})
SIGMAS = 3.0
"""A healthy step in 370 lies beyond, of a normal distribution: the look is at whether there is anything at all."""
MIN_STEPS = 16
BASELINE_STEPS = 64
KEEP_SCALARS = 512
KEEP_COLUMNS = 64
"""A frame of 1,680 tensors is 47 KB. At most twice as many are held: letting them go together, and so seldom, costs the
training thread a tenth of letting one go in every step."""
RECENT_STEPS = 32
"""Looked at where an order names no onset."""
SHARE = 0.01
"""Of a tensor's elements; ordinary ones lose about a thousandth to underflow."""
FLOOR = 0.01
"""Least robust deviation of a logarithm: a series that hardly moves is not out of band for a hundredth."""
_WATCHED = ("loss", "grad_norm", "update_rms")


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    scalars: dict[str, float]


class Evidence:
    """Keeps this rank's last frames. `note` is called for each; the rest only when somebody orders something."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._recent: deque[tuple[PendingFrame, Layout]] = deque()
        self._older: deque[_Point] = deque(maxlen=KEEP_SCALARS - KEEP_COLUMNS)
        """What is kept of those that were recent once."""

    def note(self, frame: PendingFrame, layout: Layout) -> None:
        """A frame of this rank, as it was sent; looked into when somebody asks, or when its columns are let go."""
        self._recent.append((frame, layout))
        if len(self._recent) > 2 * KEEP_COLUMNS:
            self._older.extend(_points([self._recent.popleft()[0] for _ in range(KEEP_COLUMNS)]))

    def objection(self, command: Command) -> str | None:
        """Why this rank does not agree to it; None: it has seen something itself, or cannot judge."""
        if command.verb != "apply" or command.action not in DRASTIC:
            return None
        named = command.because.get("rank")
        if isinstance(named, int) and named != self._rank:
            return None if 0 <= named < self._world_size else f"rank {named} is named, and there is none"
        found = command.because.get("onset_step", command.params.get("onset_step"))
        onset = found if isinstance(found, int) else None
        before, since = self._split(onset)
        if len(before) < MIN_STEPS:
            return None
        named_tensors = command.because.get("tensors", ())
        if not isinstance(named_tensors, list | tuple):
            return f"because names tensors as {named_tensors!r}, a list is wanted"
        tensors = [str(name) for name in named_tensors]
        if self.seen(before, since, tensors, onset):
            return None
        steps = f"steps {since[0].step} to {since[-1].step}" if since else "no step since"
        return f"rank {self._rank} sees nothing unusual in its own frames ({steps})"

    def seen(self, before: Sequence[_Point], since: Sequence[_Point], tensors: list[str], onset: int | None) -> bool:
        """Whether anything speaks for trouble since the onset."""
        if any(_is_broken(point.scalars) for point in since):
            return True
        for name in _WATCHED:
            if _is_out_of_band(_values(before, name), _values(since, name)):
                return True
        return any(self._tensor_speaks(name, onset) for name in tensors)

    def _split(self, onset: int | None) -> tuple[list[_Point], list[_Point]]:
        points = [*self._older, *_points(frame for frame, _ in self._recent)]
        if onset is None:
            since = points[-RECENT_STEPS:]
            before = points[: len(points) - len(since)]
        else:
            # Not by position alone: after a rollback the same steps come again.
            first = next((place for place, point in enumerate(points) if point.step >= onset), len(points))
            before, since = points[:first], points[first:]
        return before[-BASELINE_STEPS:], since

    def _tensor_speaks(self, name: str, onset: int | None) -> bool:
        recent = list(self._recent)[-KEEP_COLUMNS:]
        history = [read for frame, layout in recent if (read := _read(frame, layout, name)) is not None]
        since = [one for one in history if onset is None or one.step >= onset]
        before = [one.amax for one in history if onset is not None and one.step < onset]
        window = max((one.amax for one in history if math.isfinite(one.amax)), default=0.0)
        for one in since:
            if not (math.isfinite(one.amax) and math.isfinite(one.scale) and one.scale > 0 and one.amax >= 0):
                return True
            if one.amax * one.scale > one.fp8_max or one.share > SHARE:
                return True
            if window > 0 and abs(math.log2(one.scale * window / (one.fp8_max * 2.0**-one.margin))) > 1.0:
                return True
        return _is_out_of_band(before, [one.amax for one in since], least=math.log(2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    step: int
    amax: float
    scale: float
    fp8_max: float
    margin: float
    share: float


def _points(frames: Iterable[PendingFrame]) -> Iterator[_Point]:
    """But for those that cannot be read, which the transport counts: they must not take the word from the others."""
    for frame in frames:
        with suppress(Exception):
            yield _Point(frame.step, frame.scalars())


def _read(pending: PendingFrame, layout: Layout, name: str) -> _Tensor | None:
    place = next((index for index, column in enumerate(layout.columns) if column.name == name), None)
    if place is None:
        return None
    try:
        frame = pending.frame()
    except Exception:  # as above
        return None
    if layout.layout_id != frame.layout_id:
        return None
    column = layout.columns[place]
    values: dict[str, float] = {}
    for key in ("amax", "scale", "quantized", "saturated", "underflowed"):
        if key in frame.columns:
            data, valid = columns.unpack(frame.columns[key])
            if place < len(data) and valid[place]:
                values[key] = float(np.asarray(data)[place])
    if "amax" not in values or "scale" not in values:
        return None
    lost = max(values.get("saturated", 0.0), values.get("underflowed", 0.0))
    return _Tensor(
        step=frame.step, amax=values["amax"], scale=values["scale"], fp8_max=FORMATS[column.fp8_format].max,
        margin=column.margin, share=lost / values["quantized"] if values.get("quantized") else 0.0,
    )  # fmt: skip


def _is_broken(scalars: dict[str, float]) -> bool:
    values = [scalars[name] for name in ("loss", "grad_norm") if name in scalars]
    return (
        any(not math.isfinite(value) for value in values)
        or scalars.get("param_nonfinite", 0.0) > 0
        or scalars.get("update_skipped", 0.0) > 0
    )


def _values(points: Iterable[_Point], name: str) -> list[float]:
    return [point.scalars[name] for point in points if name in point.scalars]


def _is_out_of_band(before: Sequence[float], since: Sequence[float], *, least: float = 0.0) -> bool:
    """Whether any of `since`, or the mean of its last eight, is far from the median of `before`, in logarithms."""
    base = [math.log(value) for value in before if value > 0 and math.isfinite(value)]
    now = [math.log(value) for value in since if value > 0 and math.isfinite(value)]
    if len(base) < MIN_STEPS or not now:
        return False
    middle = median(base)
    sigma = max(FLOOR, 1.4826 * median(abs(value - middle) for value in base))
    limit = max(SIGMAS * sigma, least)
    if any(abs(value - middle) > limit for value in now):
        return True
    # A mean of eight scatters by a third as much.
    return len(now) >= 8 and abs(fmean(now[-8:]) - middle) > max(SIGMAS * sigma / math.sqrt(8.0), least)
