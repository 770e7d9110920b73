"""CPU time of the training thread inside fp8watch, by entry point."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

WARM, STEPS = 80, 60
"""Steps before the measurement, until the last 64 frames that are kept begin to replace older ones; measured steps."""


class Meter:
    """Adds up the thread's CPU time inside wrapped functions; nested calls count once."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        """`synchronize` is called before each measurement, because a launch waits while the device's queue is full, and
        in the bare loop another launch would have waited."""
        self._synchronize = synchronize
        self._local = threading.local()
        self._put: list[tuple[Any, str, Any]] = []
        self.spent: dict[bool, float] = {True: 0.0, False: 0.0}
        """Microseconds since `reset`, on the training thread and on others."""
        self._home = threading.get_ident()

    def wrap(self, holder: Any, name: str, *, is_ours: bool = True) -> None:
        """Count calls of `holder.name`. Not `is_ours`: time that the bare loop would spend too, which is subtracted."""
        original = getattr(holder, name)

        def counted(*args: Any, **options: Any) -> Any:
            depth = getattr(self._local, "depth", 0)
            if is_ours and depth:
                return original(*args, **options)
            if is_ours:
                self._local.depth = depth + 1
                self._synchronize()
            started = time.thread_time_ns()
            try:
                return original(*args, **options)
            finally:
                spent = (time.thread_time_ns() - started) / 1e3
                is_home = threading.get_ident() == self._home
                self.spent[is_home] += spent if is_ours else -spent
                if is_ours:
                    self._local.depth = depth

        self._put.append((holder, name, original))
        setattr(holder, name, counted)

    def restore(self) -> None:
        """Restore the original functions."""
        for holder, name, original in reversed(self._put):
            setattr(holder, name, original)


def measure_cpu(training: Any, watch: Any, synchronize: Callable[[], None] = torch.cuda.synchronize) -> dict[str, Any]:
    """Median over steps, in microseconds. Detaches the watch."""
    from fp8watch.actions import clip_control
    from fp8watch.capture.te import tap as te_tap

    for _ in range(WARM):
        training.step(watch)
    meter = Meter(synchronize)
    recorder = watch._recorder
    for name in ("step", "clip_grad_norm_"):
        meter.wrap(watch, name)
    for name in ("before_update", "enter_update", "leave_update", "after_update"):
        meter.wrap(recorder, name)
    meter.wrap(clip_control, "torch_clip_grad_norm_", is_ours=False)
    for tap in te_tap._taps.values():
        # Bound methods are compared by object and function, so each subscriber is replaced by a counting one.
        tap._subscribers = tuple(_counted(meter, subscriber) for subscriber in tap._subscribers)
    home, others = [], []
    for _ in range(STEPS):
        meter.spent = {True: 0.0, False: 0.0}
        training.step(watch)
        home.append(meter.spent[True])
        others.append(meter.spent[False])
    meter.restore()
    for tap in te_tap._taps.values():
        tap._subscribers = tuple(getattr(subscriber, "original", subscriber) for subscriber in tap._subscribers)
    watch.detach()
    return {
        "cpu_us": statistics.median(home), "cpu_us_autograd_thread": statistics.median(others),
        "raw_cpu": {"training_thread_us": home, "autograd_thread_us": others},
    }  # fmt: skip


def _counted(meter: Meter, subscriber: Callable[..., Any]) -> Callable[..., Any]:
    class Holder:
        call = staticmethod(subscriber)

    meter.wrap(Holder, "call")
    counted = Holder.call

    def call(*args: Any) -> Any:
        return counted(*args)

    call.original = subscriber  # type: ignore[attr-defined]
    return call
