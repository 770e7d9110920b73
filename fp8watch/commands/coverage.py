"""How many of a run's FP8 modules are seen, by the newest layout of each rank: for `doctor` and `runs show`."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8watch.controller.stores.base import Store
from fp8watch.records import Layout

MOST_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Modules of all ranks by name: a module counts as seen if any rank sees it."""

    observed: int
    expected: int
    missing: list[str]
    """`name: reason` for modules and other quantities that no rank sees."""
    aliases: dict[str, list[str]] = field(default_factory=dict)
    """Modules and parameters that the model holds in several places, by the name under which they are seen."""

    @property
    def is_whole(self) -> bool:
        """Whether every FP8 module is seen."""
        return self.observed >= self.expected

    def text(self) -> str:
        """The result in one line."""
        text = f"{self.observed} of {self.expected} FP8 modules observed"
        if self.missing:
            text += f"; not observed: {_shown(self.missing)}"
        if self.aliases:
            shared = [f"{name} is also {', '.join(others)}" for name, others in self.aliases.items()]
            text += f"; in several places: {_shown(shared)}"
        return text


def of_run(store: Store, run: str) -> Coverage | None:
    """The coverage of a run; None: the run has announced no layout."""
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
    shared = {name: others for layout in newest.values() for name, others in layout.aliases.items()}
    return Coverage(observed=len(seen), expected=len(seen) + max(0, unseen), missing=list(missing), aliases=shared)


def _shown(entries: list[str]) -> str:
    more = f"; and {len(entries) - MOST_NAMES} more" if len(entries) > MOST_NAMES else ""
    return "; ".join(entries[:MOST_NAMES]) + more
