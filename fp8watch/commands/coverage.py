"""How much of a run's FP8 modules is seen, by the newest layout of each rank: for `doctor` and `runs show`."""

from __future__ import annotations

from dataclasses import dataclass

from fp8watch.controller.store import Store
from fp8watch.records import Layout

MOST_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Modules of all ranks by name: a module that any rank sees counts as seen."""

    observed: int
    expected: int
    missing: list[str]
    """`name: reason` of what no rank sees, modules and other quantities."""

    @property
    def is_whole(self) -> bool:
        """Whether every FP8 module is seen."""
        return self.observed >= self.expected

    def text(self) -> str:
        """One line."""
        head = f"{self.observed} of {self.expected} FP8 modules observed"
        if not self.missing:
            return head
        more = f"; and {len(self.missing) - MOST_NAMES} more" if len(self.missing) > MOST_NAMES else ""
        return f"{head}; not observed: {'; '.join(self.missing[:MOST_NAMES])}{more}"


def of_run(store: Store, run: str) -> Coverage | None:
    """None: the run has announced no layout."""
    newest: dict[int, Layout] = {}
    for layout in store.read(run, Layout):
        newest[layout.rank] = layout
    if not newest:
        return None
    seen = {column.module for layout in newest.values() for column in layout.columns}
    missing = dict.fromkeys(
        entry
        for layout in newest.values()
        for entry in layout.not_observable
        if entry.partition(": ")[0] not in seen
    )  # fmt: skip
    unseen = max(layout.expected_modules - layout.observed_modules for layout in newest.values())
    return Coverage(observed=len(seen), expected=len(seen) + max(0, unseen), missing=list(missing))
