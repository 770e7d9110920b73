"""The cost of sampling: CPU time of the thread that does the work, GPU time between two events around it.

Used on sampled steps only, around each piece of sampling work, on whatever thread does it (autograd's for a backward
cast). Events are queried on a later step and never waited for. GPU time is the time in which the device did nothing
else, including waits for our launches. So a step cannot have lost more than the larger of the two.

Timing costs as much as a small piece of work. So only the first pieces of a step and some of the later ones are timed,
and the others are taken to cost the mean of those.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from fp8watch.capture.ring import is_capturing

TIMED_FIRST, THEN_EVERY = 3, 41
"""Pieces of a step that are timed: 7 of 192 casts, 43 of 1,680 tensors. Layers are alike, so a prime number: with one
that shares a factor with the casts of a layer, the same kinds of casts would be timed in every layer."""


Pair = tuple[Any, Any]
"""Events before and after a piece's kernels."""


@dataclass(slots=True)
class _Spent:
    """What the timed pieces cost; `timed` of the `counted` pieces."""

    numbers: count[int] = field(default_factory=count)
    """Gives each piece its number, on whatever thread."""
    counted: int = 0
    """Known when the step is closed."""
    timed: int = 0
    cpu_seconds: float = 0.0
    pairs: list[Pair] = field(default_factory=list)

    def seconds(self) -> float:
        """Estimate for all counted pieces. The events must have completed."""
        if not self.timed:
            return 0.0
        cpu = self.cpu_seconds / self.timed
        gpu: float = sum(start.elapsed_time(end) for start, end in self.pairs) / 1000 / max(len(self.pairs), 1)
        return max(cpu, gpu) * self.counted


class CostMeter:
    """Times pieces of work of one kind. `device`: where the work's kernels run."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._lock = threading.Lock()
        self._free: list[Pair] = []
        self._now = (_Spent(), _Spent())
        """Pieces that resemble each other, and pieces that do not (`is_alone`)."""
        self._waiting: deque[tuple[_Spent, _Spent]] = deque()

    def piece(self, *, is_alone: bool = False) -> AbstractContextManager[None]:
        """Context for one piece of work. `is_alone`: unlike the others, and always timed."""
        spent = self._now[is_alone]
        number = next(spent.numbers)
        if number >= TIMED_FIRST and number % THEN_EVERY and not is_alone:
            return UNTIMED
        return self._timed(spent)

    def numbers(self) -> count[int]:
        """Numbers of this step's pieces, for work so short that even `piece` is too much: it takes the `next` number
        itself, and if that is below `TIMED_FIRST` or a multiple of `THEN_EVERY`, does the work inside `timed`."""
        return self._now[0].numbers

    def timed(self) -> AbstractContextManager[None]:
        """Context for a piece whose number was taken from `numbers`."""
        return self._timed(self._now[0])

    def _timed(self, spent: _Spent) -> AbstractContextManager[None]:
        return _Timed(self, spent, self._pair() if self._is_gpu and not is_capturing() else None)

    def add(self, spent: _Spent, cpu_seconds: float, pair: Pair | None) -> None:
        """Add a timed piece."""
        with self._lock:
            spent.cpu_seconds += cpu_seconds
            spent.timed += 1
            if pair is not None:
                spent.pairs.append(pair)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was measured in this step and no earlier step is pending."""
        return not (self._waiting or self._now[0].timed or self._now[1].timed)  # first pieces are timed

    def _pair(self) -> Pair:
        with self._lock:
            if self._free:
                return self._free.pop()
        return (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def close_step(self) -> None:
        """End the step; its cost becomes known when its events have completed."""
        with self._lock:
            if self._now[0].timed or self._now[1].timed:
                for spent in self._now:
                    spent.counted = next(spent.numbers)
                self._waiting.append(self._now)
            self._now = (_Spent(), _Spent())

    def take(self) -> Iterator[float]:
        """Seconds that the samples of each finished step cost, oldest first. Never waits."""
        while self._waiting:
            step = self._waiting[0]
            pairs = [pair for spent in step for pair in spent.pairs]
            if pairs and (is_capturing() or not all(end.query() for _, end in pairs)):
                return
            self._waiting.popleft()
            seconds = sum(spent.seconds() for spent in step)
            self._free += pairs
            yield seconds


UNTIMED = nullcontext()
"""Context for a piece that is not timed."""


class _Timed:
    """One timed piece."""

    __slots__ = ("_meter", "_pair", "_spent", "_started", "_stream")

    def __init__(self, meter: CostMeter, spent: _Spent, pair: Pair | None) -> None:
        self._meter, self._spent, self._pair = meter, spent, pair

    def __enter__(self) -> None:
        # Outside the CPU time: the pieces that are not timed record nothing.
        if self._pair is not None:
            self._stream = torch.cuda.current_stream()
            self._pair[0].record(self._stream)
        self._started = time.thread_time()

    def __exit__(self, *_: object) -> None:
        seconds = time.thread_time() - self._started
        if self._pair is not None:
            self._pair[1].record(self._stream)
        self._meter.add(self._spent, seconds, self._pair)
