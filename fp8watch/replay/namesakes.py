"""Unique names for recorded runs, because two logs may use the same name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath


def told_apart(runs: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each (run, path): the run's, and if several places have a run of that name, as much of the path's end
    as makes them differ: `r.csv` and `r.jsonl`, `r (a/store.sqlite)` and `r (b/store.sqlite)`.

    The same run at the same place gets the same name.
    """
    places: dict[str, set[str]] = defaultdict(set)
    for run, path in runs:
        places[run].add(path)
    return [run if len(places[run]) == 1 else _name(run, path, places[run]) for run, path in runs]


def _name(run: str, path: str, places: set[str]) -> str:
    parts = PurePath(path).parts
    others = [PurePath(other).parts for other in places if other != path]
    length = 1
    while length < len(parts) and any(other[-length:] == parts[-length:] for other in others):
        length += 1
    end = str(PurePath(*parts[-length:])) if parts else path
    return end if PurePath(path).stem == run else f"{run} ({end})"
