"""Work on a thread of its own, which the training neither waits for nor is kept alive by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def later(work: Callable[[], T], *, after: threading.Event | None = None) -> Future[T]:
    """Begin `work` on a thread; `after`: when that is set, unless the future was cancelled by then.

    Raises `RuntimeError` when no thread can be had.
    """
    future: Future[T] = Future()

    def run() -> None:
        if after is not None:
            after.wait()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fp8watch-save", daemon=True).start()
    return future
