"""What is observed of a model and what is not, and why: keeps a rank's layout up to date with its source.

Runs on the training thread in every step, so the usual step asks only whether the source's columns are the same object
as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fp8watch.capture.frames import LayoutBook
from fp8watch.capture.source import Source
from fp8watch.records import Layout, TensorColumn
from fp8watch.training.guard import Guard

UNSEEN_EVERY = 8
"""Steps after which the source is asked what it cannot observe, even if its columns are the same. In the first steps,
in which modules appear, it is asked in each."""


class Observed:
    """The layout of one rank."""

    def __init__(
        self,
        book: LayoutBook,
        source: Source | None,
        *,
        unseen: list[str],
        guard: Guard,
        note: Callable[[str], None],
    ) -> None:
        """`unseen`: `name: reason` of FP8 modules that no source reads, known at attach. `note` tells the user."""
        self._book, self._source = book, source
        self._unseen = unseen
        self._guard, self._note = guard, note
        self._reasons: dict[str, str] = {}
        self._state: tuple[Any, ...] = (None, None, -1, -1, -1)
        """From which the layout was made: columns, modules not observed, numbers of reasons and of disabled parts,
        attempt."""

    @property
    def layout(self) -> Layout:
        """The layout in force."""
        return self._book.current

    def columns(self) -> Sequence[TensorColumn]:
        """The source's columns now. Raises what the source raises."""
        return self._source.columns() if self._source is not None else ()

    def not_observed(self, name: str, reason: str) -> None:
        """Something cannot be observed: tell the user once, and say so in the layout."""
        if name not in self._reasons:
            self._reasons[name] = reason
            self._note(f"{name} not observed: {reason}")

    def not_observed_quietly(self, name: str, reason: str) -> None:
        """The same for samples, in the layout only."""
        self._reasons.setdefault(name, reason)

    def refresh(self, attempt: int) -> bool:
        """Ask the source; True: there is a new layout to announce."""
        if "layout" in self._guard.disabled:  # the source's columns as they were last, and what is off since
            columns, missing = self._state[:2]
            return bool(self._guard.call("layout of what is off", self._update, columns or (), missing or (), attempt))
        return bool(self._guard.call("layout", self._refresh, attempt))

    def refresh_if_due(self, step: int, attempt: int) -> None:
        """Refresh if the columns may have changed, or if it is time to ask what is not observable."""
        if "layout" in self._guard.disabled:
            self.refresh(attempt)
            return
        # Not `Guard.call`: the many times that nothing is due must not make up for a refresh that fails. And a refresh
        # may not meet the failure again: a source that failed once may say then that nothing has changed.
        try:
            is_due = self._is_due(step, attempt)
        except Exception as error:
            self._guard.failed("layout", error)
            return
        if is_due:
            self._guard.call("layout", self._refresh, attempt)

    def _is_due(self, step: int, attempt: int) -> bool:
        columns, _, *rest = self._state
        return (
            step % UNSEEN_EVERY == 0 or step <= UNSEEN_EVERY or self.columns() is not columns
            or rest != [len(self._reasons), len(self._guard.disabled), attempt]
        )  # fmt: skip

    def _refresh(self, attempt: int) -> bool:
        missing = self._source.not_observable() if self._source is not None else ()
        return self._update(self.columns(), missing, attempt)

    def _update(self, columns: Sequence[TensorColumn], missing: Sequence[str], attempt: int) -> bool:
        # Sources hand out the same objects as long as nothing has changed, so that nothing else need be compared.
        state = (columns, missing, len(self._reasons), len(self._guard.disabled), attempt)
        is_same = state == self._state  # the same objects are not looked into
        self._state = state
        if is_same:
            return False
        modules = list(missing)
        unseen = modules + self._unseen + [f"{name}: {why}" for name, why in self._reasons.items()]
        unseen += [f"{part}: {why}" for part, why in self._guard.off()]
        return self._book.update(columns, unseen, len(modules) + len(self._unseen), attempt)
