"""Reductions over gloo, on our own process group.

The group is made directly from a store, not by `torch.distributed.new_group`. That would have to be called on every
rank, and it numbers groups: with a watch on some ranks only, the user's own groups would no longer match.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fp8watch.training.agreement.transport import Pending, Transport, TransportLost

_c10d: Any = dist
"""The parts of torch with wrong type hints or none."""

SLICE_SECONDS = 2.0
"""A wait is cut into slices of this length, so that KeyboardInterrupt is handled between them."""


def shorten(error: BaseException) -> str:
    """gloo's message without its source location and advice, at most 200 characters."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\]\s*", "", line).split(". This is typically")[0][:200]


class GlooPending:
    """One all-reduce that was started."""

    def __init__(self, work: Any, values: torch.Tensor, error: str) -> None:
        self._work, self._values, self._error = work, values, error

    @property
    def is_done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, seconds: float) -> list[int]:
        """See `Pending`."""
        deadline = time.monotonic() + seconds
        while self._work is not None:
            left = deadline - time.monotonic()
            try:
                self._work.wait(timedelta(seconds=max(0.001, min(SLICE_SECONDS, left))))
                self._work = None
            except RuntimeError as error:
                if not self._work.is_completed():
                    if left > 0:
                        continue
                    raise TransportLost(f"a rank did not come within {seconds:g} s") from None
                # The work refers to the group, whose connections close only when nothing refers to it.
                self._work, self._error = None, _why(error, seconds)
        if self._error:
            raise TransportLost(self._error)
        return [int(value) for value in self._values.tolist()]


def _why(error: RuntimeError, seconds: float) -> str:
    """The reason for an error. gloo has the same timeout as we do, and its timeout may come first."""
    if "timed out" in str(error).lower():
        return f"a rank did not come within {seconds:g} s"
    return f"a rank is gone ({shorten(error)})"


class GlooTransport:
    """A gloo group of `ranks` processes. The constructor is a collective call. It raises `RuntimeError` when a rank
    does not take part within `seconds`."""

    def __init__(self, store: Any, rank: int, ranks: int, *, seconds: float) -> None:
        self._group: Any = _c10d.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=seconds))
        self._options = _c10d.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MIN
        self._last: GlooPending | None = None

    def start(self, values: Sequence[int]) -> Pending:
        """See `Transport`."""
        tensor = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        work, error = None, ""
        if self._group is None:
            error = "the group is closed"
        else:
            try:
                work = self._group.allreduce([tensor], self._options)
            except RuntimeError as failure:
                error = f"a rank is gone ({shorten(failure)})"
        self._last = GlooPending(work, tensor, error)
        return self._last

    def close(self) -> None:
        """See `Transport`."""
        group, self._group = self._group, None
        last, self._last = self._last, None
        if group is not None and last is not None and not last.is_done:
            # The destructor would wait for the work to end, so the group is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class TwoLevels:
    """Reduces within each node, then over one leader per node, then distributes the result within each node.

    The three steps run on a thread, so that `start` never waits.
    """

    def __init__(self, local: Transport, leaders: Transport | None, *, seconds: float) -> None:
        """`leaders`: None on ranks that lead no node."""
        self._local, self._leaders, self._seconds = local, leaders, seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fp8watch-agree")
        self._is_closed = False

    def start(self, values: Sequence[int]) -> Pending:
        """See `Transport`."""
        try:
            return _Later(self._thread.submit(self._reduce, list(values)))
        except RuntimeError:
            return _Later(None)

    def _reduce(self, values: list[int]) -> list[int]:
        try:
            found = self._local.start(values).wait(self._seconds)
            if self._leaders is not None:
                found = self._leaders.start(found).wait(self._seconds)
            # The leader contributes the minimum of all nodes, which is also the minimum within the node.
            return self._local.start(found).wait(self._seconds)
        except TransportLost:
            self._close_groups()
            raise

    def close(self) -> None:
        """See `Transport`."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.shutdown(wait=False)
            self._close_groups()

    def _close_groups(self) -> None:
        self._local.close()
        if self._leaders is not None:
            self._leaders.close()


class _Later:
    def __init__(self, future: Future[list[int]] | None) -> None:
        self._future = future

    def wait(self, seconds: float) -> list[int]:
        if self._future is None:
            raise TransportLost("the group is closed")
        try:
            return self._future.result(seconds)
        except FutureTimeout:
            raise TransportLost(f"a rank did not come within {seconds:g} s") from None
