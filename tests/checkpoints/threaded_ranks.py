"""What several ranks do at the same time, each on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def at_once(acts: list[Callable[[], Any]]) -> list[Any]:
    """What each came to, or what it raised; None for one that has not ended in half a minute."""
    found: list[Any] = [None] * len(acts)

    def run(index: int) -> None:
        try:
            found[index] = acts[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found
