"""What sampling costs: CPU time of the thread that does it, GPU time between two events around it.

Used on sampled steps only, around each piece of sampling work, on whatever thread that runs (autograd's for a
backward cast). Events are asked on a later step and never waited for. GPU time counts what the device could not do for
others meanwhile, waiting for our launches included; so the larger of the two is what a step can have lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8watch.capture.ring import is_capturing

MOST_PAIRS = 128
"""Event pairs a step: what is beyond is taken to cost as much as the mean of those (1,680 tensors would need 3,360)."""


class CostMeter:
    """Times pieces of work of one kind. `device`: where the work's kernels run."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._lock = threading.Lock()
        self._cpu_seconds = 0.0
        self._pieces = 0
        self._pairs: list[tuple[Any, Any]] = []
        self._free: list[tuple[Any, Any]] = []
        self._waiting: deque[tuple[float, int, list[tuple[Any, Any]]]] = deque()

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Around one piece of work."""
        pair = self._pair() if self._is_gpu and not is_capturing() else None
        started = time.thread_time()
        if pair is not None:
            pair[0].record()
        try:
            yield
        finally:
            if pair is not None:
                pair[1].record()
            seconds = time.thread_time() - started
            with self._lock:
                self._cpu_seconds += seconds
                self._pieces += 1
                if pair is not None:
                    self._pairs.append(pair)

    def _pair(self) -> tuple[Any, Any] | None:
        with self._lock:
            if len(self._pairs) >= MOST_PAIRS:
                return None
            if self._free:
                return self._free.pop()
        return (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def close_step(self) -> None:
        """The step is over: its sum becomes known once its events have passed."""
        with self._lock:
            if self._pieces:
                self._waiting.append((self._cpu_seconds, self._pieces, self._pairs))
            self._cpu_seconds, self._pieces, self._pairs = 0.0, 0, []

    def take(self) -> Iterator[float]:
        """Seconds that each finished step's samples have cost, oldest first; never waits."""
        while self._waiting:
            cpu_seconds, pieces, pairs = self._waiting[0]
            if pairs and (is_capturing() or not all(end.query() for _, end in pairs)):
                return
            self._waiting.popleft()
            gpu_seconds = 0.0
            if pairs:
                gpu_seconds = sum(start.elapsed_time(end) for start, end in pairs) / 1000 * pieces / len(pairs)
                self._free += pairs
            yield max(cpu_seconds, gpu_seconds)
