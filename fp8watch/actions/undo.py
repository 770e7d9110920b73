"""Makes what an action changes all or nothing: on this rank when it fails half-way, on the others when it fails here.

Before an action changes anything, it adds the step that takes it back exactly. If the action raises, the steps are run,
last one first, and nothing has been changed. The steps of an application that succeeded are kept until its boundary is
over, because it may have failed on another rank. Unlike a revert, they leave no trace: a hold is not released over some
steps, and a repaired scale is what it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

from fp8watch.errors import ActionError, CheckpointError, PartlyChanged

if TYPE_CHECKING:
    from fp8watch.actions.base import Action, Applied

logger = logging.getLogger(__name__)

S = TypeVar("S")


class Undo:
    """The steps that take back what was changed at this boundary. They do not survive an optimizer step."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []

    def add(self, what: str, step: Callable[[], object]) -> None:
        """`what` stays changed if `step` raises. Added before the change, so `step` must also be right without it."""
        self._steps.append((what, step))

    def run(self) -> str:
        """Run the steps, last one first, each one once. Returns what is still changed, and why, or "".

        An interruption is passed on after the last step: what is half undone would stay for good. The step that it has
        met first is run again.
        """
        left: list[str] = []
        interruption: BaseException | None = None
        while self._steps:
            what, step = self._steps[-1]
            try:
                step()
            except BaseException as error:
                if not isinstance(error, Exception) and interruption is None:
                    interruption = error
                    continue
                left.append(f"{what} ({type(error).__name__}: {error})")
            self._steps.pop()
        said = f"still changed: {', '.join(left)}" if left else ""
        if interruption is None:
            return said
        if said:
            logger.error("fp8watch: interrupted while it was taken back, %s", said)
        raise interruption


@contextlib.contextmanager
def whole(name: str) -> Iterator[Undo]:
    """A part of action `name` that is done as a whole or not at all.

    After an error nothing is changed, and it is raised as `ActionError` (a `CheckpointError`, and what is no
    `Exception`, as it was). Raises `PartlyChanged` when something is still changed.
    """
    undo = Undo()
    try:
        yield undo
    except BaseException as error:
        left = undo.run()
        if not isinstance(error, Exception):
            if left:
                logger.error("fp8watch: %s was interrupted, %s", name, left)
            raise
        is_foreseen = isinstance(error, ActionError | CheckpointError | PartlyChanged)
        why = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
        if not is_foreseen:
            logger.warning("fp8watch: %s failed", name, exc_info=error)
        if left:
            raise PartlyChanged(f"{why}; {left}") from error
        if is_foreseen:
            raise
        raise ActionError(why) from error


def all_or_nothing(
    apply: Callable[[S, int, dict[str, Any], Undo], Applied],
) -> Callable[Concatenate[S, int, dict[str, Any], ...], Applied]:
    """Makes `apply(self, step, params, undo)` the `apply` of an action, see `whole`."""

    @functools.wraps(apply)
    def apply_whole(self: S, step: int, params: dict[str, Any]) -> Applied:
        with whole(str(getattr(self, "name", type(self).__name__))) as undo:
            return dataclasses.replace(apply(self, step, params, undo), undo=undo)

    return apply_whole


def take_back(action: Action, applied: Applied) -> None:
    """Undo an application before the next optimizer step. Raises `PartlyChanged`, or what `revert` raises."""
    if applied.undo is None:
        action.revert(applied)
    elif left := applied.undo.run():
        raise PartlyChanged(left)


def settled(applied: Applied) -> Applied:
    """An application that is not taken back any more: it holds no copy of what was before."""
    return dataclasses.replace(applied, undo=None)
