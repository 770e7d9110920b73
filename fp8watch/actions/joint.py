"""What ranks settle between them before an action overwrites anything that cannot be taken back.

They go through it in the same order, each question being asked on all of them: whether this rank can act at all, then
target by target whether it is sound here. The answers' minimum decides.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable


class Answer(IntEnum):
    """One rank's answer. The order matters: ranks take the lowest."""

    CANNOT = 0
    """Not here, whatever the target: the action is called off."""
    DAMAGED = 1
    """Not this target: the next one."""
    YES = 2


Ask = Callable[[Answer, str], Answer]
"""(this rank's answer, what it is about) -> the lowest of all ranks'; `CANNOT` when they speak of different things."""


@runtime_checkable
class Choosing(Protocol):
    """An action with a target that all ranks have to be able to use."""

    def choose(self, step: int, params: dict[str, Any], ask: Ask) -> None:
        """Settle the target and read it; `apply` comes next. Raises `ActionError` or `CheckpointError` on all ranks
        when there is none. Asks the same number of questions on all of them, also where it fails."""

    def drop_choice(self) -> None:
        """Forget what `choose` has read; nothing is applied."""
