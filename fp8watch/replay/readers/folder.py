"""Finds the logs in a folder that replay can read: one run's log, or those of the runs below it.

Trainers nest their output (`output/checkpoint-500/trainer_state.json`, `lightning_logs/version_0/metrics.csv`,
`wandb/run-.../files/wandb-history.jsonl`, `runs/<date>/events.out.tfevents...`, `.fp8watch/runs/<run>/store.sqlite`).
The first log on the way down is that of its folder; everything below it belongs to the same run.
"""

from __future__ import annotations

import os
from pathlib import Path

from fp8watch.errors import BadInput

STORES = frozenset({".db", ".sqlite", ".sqlite3"})
RECORDINGS = frozenset({".fp8rec"})
NAMES = ("trainer_state.json", "metrics.csv", "wandb-history.jsonl", "files/wandb-history.jsonl")
"""Fixed names of logs, in order of preference; event files come after the first."""
LOOSE = frozenset({".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".log", ".txt"})
MAX_FOLDERS = 20_000
"""Most folders that are searched."""
_CHECKPOINT = "checkpoint-"


def logs(folder: Path) -> list[Path]:
    """Files, and folders of event files, in order of their names. Raises `BadInput` if there are none."""
    found: list[Path] = []
    count = 0
    for name, below, files in os.walk(folder):
        count += 1
        if count > MAX_FOLDERS:
            raise BadInput([f"{folder}:1: folder: more than {MAX_FOLDERS} folders; name the run's own"])
        here = Path(name)
        log = _log(here, files)
        if log is not None:
            found.append(log)
            below.clear()
            continue
        found += [here / file for file in files if Path(file).suffix in STORES | RECORDINGS]
        below[:] = _newest_checkpoint(sorted(below))
    if not found:
        raise BadInput([f"{folder}:1: folder: {_nothing(folder)}"])
    return sorted(found)


def _log(folder: Path, files: list[str]) -> Path | None:
    """The log of a run in this folder itself."""
    if NAMES[0] in files:
        return folder / NAMES[0]
    if any("tfevents" in name for name in files):
        return folder
    return next((folder / name for name in NAMES[1:] if (folder / name).is_file()), None)


def _newest_checkpoint(folders: list[str]) -> list[str]:
    """The folders, but of Trainer's checkpoints only the newest, because each has the whole history up to it."""
    numbers = {name: int(name.removeprefix(_CHECKPOINT)) for name in folders if _is_checkpoint(name)}
    newest = max(numbers, key=lambda name: numbers[name], default="")
    return [name for name in folders if name not in numbers or name == newest]


def _is_checkpoint(name: str) -> bool:
    number = name.removeprefix(_CHECKPOINT)
    return name != number and number.isascii() and number.isdigit() and len(number) < 19


def _nothing(folder: Path) -> str:
    known = "trainer_state.json, metrics.csv, W&B history, event files, store or recording"
    loose = sorted(item.name for item in folder.iterdir() if item.is_file() and item.suffix in LOOSE)[:3]
    return f"no {known} in it" + (f"; give files by name: {', '.join(loose)}" if loose else "")
