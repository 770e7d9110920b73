"""The three verbs of every action: apply, read back, revert.

Success is never assumed: `read_back` looks at the effective value (the LR that the optimizer used, the limit
the clip applied, the precision a module ran in), because FP8 libraries have many settings that are silently
ignored. All three run on the training thread at a step boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """What was found in force after an action. `ok` None: not visible yet, ask at the next boundary."""

    ok: bool | None
    observed: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What an action did, enough to read it back and to undo it."""

    step: int
    params: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    steps_replayed: int = 0


class Action(Protocol):
    """One thing that can be changed in a live run."""

    name: str

    def unavailable(self) -> str | None:
        """Why it cannot be done in this run, asked at attach; None: it can."""

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """Do it. Raises `ActionError` with nothing changed."""

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether it is in force."""

    def revert(self, applied: Applied) -> None:
        """Undo it. Raises `ActionError` for what cannot be undone."""
