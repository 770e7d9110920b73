"""Agreement of all ranks on a target, before an action overwrites anything that cannot be restored.

All ranks answer the same questions in the same order: first whether the rank can act at all, then for each target in
turn whether it is intact there. The lowest answer decides.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable


class Answer(IntEnum):
    """One rank's answer. The order matters: the lowest of all ranks' answers counts."""

    CANNOT = 0
    """Not on this rank, whatever the target: the action is cancelled."""
    DAMAGED = 1
    """Not this target: try the next one."""
    YES = 2


Ask = Callable[[Answer, str], Answer]
"""(this rank's answer, its subject) -> the lowest answer of all ranks; `CANNOT` when their subjects differ."""


@runtime_checkable
class Choosing(Protocol):
    """An action with a target that all ranks must be able to use."""

    def choose(self, step: int, params: dict[str, Any], ask: Ask) -> None:
        """Agree on the target and load it; `apply` is called next. Raises `ActionError` or `CheckpointError` on all
        ranks when there is no target. Asks the same number of questions on every rank, also on one that fails."""
