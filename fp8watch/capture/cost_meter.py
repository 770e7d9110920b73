"""The cost of sampling: CPU time of the thread that does the work, GPU time between two events around it.

Used on sampled steps only, around each piece of sampling work, on whatever thread does it (autograd's for a backward
cast). Events are queried on a later step and never waited for. GPU time is the time in which the device did nothing
else, including waits for our launches. So a step cannot have lost more than the larger of the two.

Timing costs as much as a small piece of work. So only some pieces of a step are timed, others in each step, and those
that are not are taken to cost the mean of those that are.
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

TIMED = 9
"""Pieces of a step that are timed, about: pieces differ twentyfold in size, and the governor smooths over steps."""
AT_FIRST = 7
"""One piece in so many is timed as long as it is not known how many pieces a step has."""


def spacing(num_pieces: int) -> int:
    """One piece in so many is timed in a step that is expected to have `num_pieces`.

    Layers are alike, with a multiple of two or three casts each: a number that shares no factor with that, or the same
    kinds of casts would be timed in every layer.
    """
    every = max(1, num_pieces // TIMED)
    while every % 2 == 0 or (every > 1 and every % 3 == 0):
        every -= 1
    return every


Pair = tuple[Any, Any]
"""Events before and after a piece's kernels."""


@dataclass(slots=True)
class _Spent:
    """What the timed pieces cost; `timed` of the `counted` pieces."""

    every: int = AT_FIRST
    """A piece is timed if its number is a multiple of this."""
    start: int = 0
    """Number of the first piece; another one in each step."""
    numbers: count[int] = field(init=False)
    """Gives each piece its number, on whatever thread."""
    counted: int = 0
    """Known when the step is closed."""
    timed: int = 0
    cpu_seconds: float = 0.0
    pairs: list[Pair] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = count(self.start)

    def close(self) -> _Spent:
        """End it; returns the next step's."""
        self.counted = next(self.numbers) - self.start
        if not self.counted:
            return _Spent(self.every, self.start)
        every = spacing(self.counted)
        return _Spent(every, (self.start + max(1, round(0.618 * every))) % every)

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
        if next(spent.numbers) % spent.every and not is_alone:
            return UNTIMED
        return self._timed(spent)

    def numbers(self) -> tuple[count[int], int]:
        """Numbers of this step's pieces, and of which number a multiple is timed: for work so short that even `piece`
        is too much. It takes the `next` number itself, and does the work inside `timed` if its turn has come."""
        return self._now[0].numbers, self._now[0].every

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
        return not (self._waiting or self._now[0].timed or self._now[1].timed)

    def _pair(self) -> Pair:
        with self._lock:
            if self._free:
                return self._free.pop()
        return (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def close_step(self) -> None:
        """End the step; its cost becomes known when its events have completed."""
        with self._lock:
            following = (self._now[0].close(), self._now[1].close())
            if self._now[0].timed or self._now[1].timed:
                self._waiting.append(self._now)
            self._now = following

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
