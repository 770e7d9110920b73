"""Runs work on a daemon thread, which training does not wait for and which does not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def later(work: Callable[[], T], *, after: threading.Event | None = None) -> Future[T]:
    """Run `work` on a new thread. With `after` it waits for that event, and does not run if the future was cancelled by
    then.

    Raises `RuntimeError` when no thread can be started.
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
