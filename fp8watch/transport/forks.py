"""Closes a channel's socket in forked children.

For the agent, a rank ends when its socket closes. A DataLoader worker that was forked while the socket was open would
keep it open after the trainer was killed. Close-on-exec does not help against a fork without exec.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """Something that must close its file descriptors in a forked child."""

    def after_fork_in_child(self) -> None:
        """Close the inherited descriptors. Runs in the child, on its only thread, and must take no lock."""


_watched: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def watch(item: ForkAware) -> None:
    """Call `item.after_fork_in_child()` in every child that is forked from now on, as long as `item` lives."""
    _watched.add(item)


def _in_child() -> None:
    for item in list(_watched):
        item.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
