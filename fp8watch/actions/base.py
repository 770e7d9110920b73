"""The three verbs of every action: apply, read back, revert.

`read_back` looks at the effective value (the LR that the optimizer used, the limit that the clip applied, the precision
in which a module ran), because FP8 libraries silently ignore many settings. All three run on the training thread at a
step boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from fp8watch.actions.undo import Undo


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """The effective value found after an action. `ok` None: it is not visible yet, so read back again at the next
    boundary."""

    ok: bool | None
    observed: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What an action did: enough to read it back and to undo it."""

    step: int
    params: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    steps_replayed: int = 0
    undo: Undo | None = field(default=None, repr=False, compare=False)
    """Takes it back exactly, until its boundary is over; None: only `revert` does."""


class Action(Protocol):
    """One thing that can be changed in a live run."""

    name: str

    def unavailable(self) -> str | None:
        """Why the action cannot be done in this run, or None if it can. Asked at attach."""

    def apply(self, step: int, params: dict[str, Any], /) -> Applied:
        """Do it. Raises `ActionError`, and then nothing has been changed, or `PartlyChanged`. See
        `fp8watch.actions.undo.all_or_nothing`."""

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the change is in force."""

    def revert(self, applied: Applied) -> None:
        """Undo it. Raises `ActionError` if it cannot be undone."""

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether the change is no longer in force. Called from the boundary of the revert on, like `read_back`."""
